"""The few metrics of vLLM by which routers of the Gateway API inference extension choose, under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class VllmMetricNames(Collector):
    """Reads at scrape time, in the scraper's thread."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        block_size: int,
        num_blocks: int,
        counts: Callable[[], tuple[int, int]],
        held_blocks: Callable[[], int],
    ) -> None:
        """counts: running and waiting requests. num_blocks: usable ones."""
        self._model = model
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._counts = counts
        self._held_blocks = held_blocks
        registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        running, waiting = self._counts()
        yield self._gauge("vllm:num_requests_running", "Requests that run.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the blocks that sequences hold, 0 to 1; cached blocks that nobody holds are free.",
            self._held_blocks() / self._num_blocks,
        )
        sizes = {"block_size": str(self._block_size), "num_gpu_blocks": str(self._num_blocks)}
        yield self._gauge("vllm:cache_config_info", "Block size, and usable blocks.", 1, **sizes)
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield self._gauge(
            "vllm:lora_requests_info", "Adapters in use: none. The value is the time.", time.time(), **adapters
        )

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> GaugeMetricFamily:
        labels = {"model_name": self._model, **labels}
        family = GaugeMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

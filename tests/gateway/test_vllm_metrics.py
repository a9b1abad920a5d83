"""What the endpoint picker of the Gateway API inference extension scrapes, as its model server protocol has it."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.vllm_metrics import VllmMetricNames


def test_the_names_types_and_labels_are_those_of_the_protocol() -> None:
    registry = CollectorRegistry()
    before = time.time()
    VllmMetricNames(registry, "m", block_size=16, num_blocks=200, counts=lambda: (3, 5), held_blocks=lambda: 50)
    families = {each.name: each for each in text_string_to_metric_families(generate_latest(registry).decode())}
    assert {each.type for each in families.values()} == {"gauge"}
    samples = {name: family.samples[0] for name, family in families.items()}
    assert {name: sample.value for name, sample in samples.items() if name != "vllm:lora_requests_info"} == {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:cache_config_info": 1,
    }
    sizes = samples["vllm:cache_config_info"].labels
    assert (sizes["block_size"], sizes["num_gpu_blocks"]) == ("16", "200")
    adapters = samples["vllm:lora_requests_info"]
    # "The last updated timestamp"; the picker reads the labels of the latest one.
    assert before <= adapters.value <= time.time()
    assert adapters.labels == {
        "model_name": "m",
        "max_lora": "0",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }

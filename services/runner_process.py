"""The model runner as a process: binds, loads the model, waits for its KV manager, serves, and stops when told to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
import torch
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from model_runner.attention import AttentionBackend, create_backend
from model_runner.books import PoolFacts
from model_runner.engine import Engine
from model_runner.engine_types import EngineOptions, EngineState
from model_runner.errors import ModelLoadError
from model_runner.executor import TorchExecutor
from model_runner.kv_memory import KvMemory
from model_runner.loading import LoadedModel, demo_model_path, load_model
from model_runner.scheduler import SchedulerLimits
from model_runner.validation import Limits
from services.books_client import GrpcBooks
from services.config import ModelRunnerSettings
from services.cpus import usable_cpus
from services.errors import RUNNER_DOMAIN, StartupError
from services.grpc_server import RUNNER_MAX_RECEIVE_BYTES, bind, create_server, enable_reflection, stop_gracefully
from services.health import Health
from services.metrics import MetricsServer, new_registry, octavo_version, start_metrics_server
from services.rpc_interceptor import RpcInterceptor
from services.runner_errors import runner_failure
from services.runner_metrics import RunnerMetrics
from services.runner_service import RUNNER_SERVICE_NAME, ModelRunnerServicer, ServedModel
from services.signals import stop_signal
from services.streams import Streams

log = structlog.get_logger()

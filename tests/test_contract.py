"""The contract: stubs that fit the .proto files, a clean lint, and services that describe themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from octavo.kv.v1 import kv_manager_pb2
from octavo.runner.v1 import model_runner_pb2, runner_admin_pb2

ROOT = Path(__file__).parents[1]

KV_VERBS = """
    OpenPool ClosePool Allocate Append Fork Free Truncate Lookup GetBlockTable ListSequences GetPool GetTenant SetQuota
    RemovePrefix ResetCache WatchEvents Check Session
"""
RUNNER_VERBS = "Generate Tokenize Detokenize GetModel ListRequests Abort"
ADMIN_VERBS = "Drain"


def test_stubs_are_those_of_the_proto_files() -> None:
    command = [sys.executable, "protos/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_stale_stub_is_seen(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    proto = tmp_path / "protos/octavo/kv/v1/kv_manager.proto"
    proto.write_text(proto.read_text().replace("int64 queried_tokens = 6;", "int64 queried_tokens = 60;"))
    command = [sys.executable, "protos/generate.py", "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "octavo/kv/v1/kv_manager_pb2.py" in done.stderr


def test_lint_is_clean() -> None:
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("buf is not installed in this environment")
    done = subprocess.run([buf, "lint", "protos"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "service", "verbs"),
    [
        (kv_manager_pb2, "KvManagerService", KV_VERBS),
        (model_runner_pb2, "ModelRunnerService", RUNNER_VERBS),
        (runner_admin_pb2, "RunnerAdminService", ADMIN_VERBS),
    ],
)
def test_the_verbs_are_there(module: object, service: str, verbs: str) -> None:
    methods = module.DESCRIPTOR.services_by_name[service].methods_by_name  # type: ignore[attr-defined]
    assert set(methods) == set(verbs.split())


def test_every_field_has_a_comment(tmp_path: Path) -> None:
    """protoc's own account of the comments: one for each field, enum value and verb."""
    from grpc_tools import protoc

    target = tmp_path / "set.bin"
    sources = [str(path) for path in (ROOT / "protos").rglob("*.proto")]
    arguments = ["--include_source_info", f"--descriptor_set_out={target}", f"-I{ROOT / 'protos'}"]
    well_known = Path(protoc.__file__).parent / "_proto"
    assert protoc.main(["protoc", *arguments, f"-I{well_known}", *sources]) == 0
    for file in FileDescriptorSet.FromString(target.read_bytes()).file:
        commented = {tuple(each.path) for each in file.source_code_info.location if each.leading_comments.strip()}
        for number, message in enumerate(file.message_type):
            for index, field in enumerate(message.field):
                assert (4, number, 2, index) in commented, f"{message.name}.{field.name}"
        for number, service in enumerate(file.service):
            for index, method in enumerate(service.method):
                assert (6, number, 2, index) in commented, f"{service.name}.{method.name}"

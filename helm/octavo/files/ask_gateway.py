"""Asks an OpenAI-compatible server for its model, and streams one token from it. Standard library only."""

import json
import os
import urllib.request

URL = os.environ["GATEWAY_URL"]
HEADERS = {"Content-Type": "application/json"}
if "GATEWAY_KEY" in os.environ:
    HEADERS["Authorization"] = f"Bearer {os.environ['GATEWAY_KEY']}"


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(URL + path, data, HEADERS), timeout=60)


with call("/v1/models") as answer:
    model = json.load(answer)["data"][0]["id"]
prompt = {"model": model, "prompt": "The capital of France is", "max_tokens": 1, "stream": True}
with call("/v1/completions", prompt) as stream:
    lines = [line.decode().strip() for line in stream if line.startswith(b"data: ")]
chunks = [json.loads(line[len("data: ") :]) for line in lines if line != "data: [DONE]"]
texts = [choice["text"] for chunk in chunks if "error" not in chunk for choice in chunk["choices"]]
if lines[-1] != "data: [DONE]" or not any(texts):
    raise SystemExit(f"{model} gave no token: {lines}")
print(f"{model}: {prompt['prompt']}{''.join(texts)}")

"""transferqueue's side of `buffer.py`: the same rows through its queue in memory. Runs in `.venv-tq`, started by it.

Reads a task as JSON from stdin (`cases`: name, rows, tokens, repeats; `seed`), prints one JSON object as its last line:
seconds of each repeat by case and part. One producer and one consumer, its default storage (two units) and controller,
each a ray actor: a process of its own.

    convert   Python lists, as an engine gives them, to tensors (by way of numpy: the fastest)
    put       until the queue says that the rows are there
    get       the consumer's metadata, then the tensors themselves
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

FIELDS = ("prompt_ids", "token_ids", "policy_mask", "logprobs", "reward")
PROMPT_TOKENS = 32
VOCABULARY = 50_000


def sample_rows(rows: int, tokens: int, seed: int) -> dict[str, list[Any]]:
    """A column each of `rows` finished trajectories with `tokens` policy tokens each, as Python lists."""
    chance = random.Random(seed)
    return {
        "prompt_ids": [chance.choices(range(VOCABULARY), k=PROMPT_TOKENS) for _ in range(rows)],
        "token_ids": [chance.choices(range(VOCABULARY), k=tokens) for _ in range(rows)],
        "policy_mask": [[True] * tokens for _ in range(rows)],
        "logprobs": [[-chance.random() for _ in range(tokens)] for _ in range(rows)],
        "reward": [chance.random() for _ in range(rows)],
    }


def measure(client: Any, case: dict[str, Any], seed: int) -> dict[str, list[float]]:
    import numpy
    import torch
    from tensordict import TensorDict

    rows = case["rows"]
    columns = sample_rows(rows, case["tokens"], seed)
    types = dict(zip(FIELDS, ("int32", "int32", "bool", "float32", "float32"), strict=True))
    times: dict[str, list[float]] = {"convert": [], "put": [], "get": []}
    for repeat in range(-1, case["repeats"]):  # the first one warms up and is not counted
        partition = f"{case['name']}-{repeat}"
        began = time.perf_counter()
        arrays = {name: numpy.array(columns[name], dtype=types[name]) for name in FIELDS}
        batch = TensorDict({name: torch.from_numpy(array) for name, array in arrays.items()}, batch_size=rows)
        converted = time.perf_counter()
        client.put(data=batch, partition_id=partition)
        put = time.perf_counter()
        meta = client.get_meta(
            data_fields=list(FIELDS), batch_size=rows, partition_id=partition, mode="fetch", task_name="train"
        )
        got = client.get_data(meta)
        done = time.perf_counter()
        first = got["token_ids"][0]
        if len(got["token_ids"]) != rows or len(first) != case["tokens"]:
            raise RuntimeError(f"{len(got['token_ids'])} of {rows} rows came back, the first of {len(first)} tokens")
        client.clear_partition(partition)
        if repeat >= 0:
            for part, value in (("convert", converted - began), ("put", put - converted), ("get", done - put)):
                times[part].append(value)
    return times


def main() -> None:
    task = json.load(sys.stdin)
    import ray
    import transfer_queue

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    transfer_queue.init()
    try:
        client = transfer_queue.get_client()
        times = {case["name"]: measure(client, case, task["seed"]) for case in task["cases"]}
    finally:
        transfer_queue.close()
        ray.shutdown()
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()

"""Laminar: asynchronous RL post-training of language models, with its state in a store.

    prompts ──draw──▶ rollout ──finish──▶ incoming ──commit──▶ experience ──batch──▶ trainer
                        ▲  flush ▼                                                     │
                        │  partials                                                    │
                        └────── weights ◀── relay ◀────────────── publish ─────────────┘

Processes share nothing but the store (any fsspec URL) and etcd; every box may die at any instant.
Packages: `buffer` (the store and who owns what), `relay` (weights), `workers` (the processes),
`simulator` (the same workers in virtual time). Imports go one way: cli -> workers -> relay -> buffer.
"""

__version__ = "0.1.0"

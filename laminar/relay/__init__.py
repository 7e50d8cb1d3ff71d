"""Weights: bytes from one memory to others, without copies on the way that are not needed.

    trainer ──copy──▶ arena (memfd) ──seal──▶ version (n, digest) ──open──▶ rollout maps it read-only
                                                    │
                     ┌──── asked by the next relay ─┘
                     ▼
    arena ◀─ pieces ─ transport (tcp, …) ─▶ checked ─▶ seen by the relay after it ─▶ held, when all are there

One relay a host holds versions in arenas and hands them over a Unix socket as file descriptors. Between hosts the
relays form a chain; each asks the nearest living one before it, and passes on what it has checked while the rest is
still coming. Invariants:

1. A version is immutable: it is sealed only once nobody else can write into its arena, and the arena is used
   again only once nobody else has it open or mapped (the kernel says so, whatever died and however).
2. Same tensors, same bytes, same digest: the layout is canonical, gaps between tensors are zero.
3. Nobody waits for a reader: if no arena is free, the relay skips a version.
4. A version is complete or absent at each relay; its chunks were checked against the digest that etcd names before
   they were passed on.

    layout arena mapping memory tensors   what a version is, and the memory that it lies in
    holdings server client protocol       what a relay holds; how processes of its host reach it
    accepting binding                     its sockets: how connections come in, where the local one lies
    reservation writing channel           memory that local processes fill, alone or together
    blocks tensor_parallel                which part of each tensor one process of several writes, or reads
    chain chunks pull                     decisions: order of the chain, pieces, one version's way here (no I/O)
    receiving transfer follower ways      versions that arrive, from whom, and when as differences
    delta transport                       how their bytes travel: whole or as differences, by sockets or by RDMA
"""

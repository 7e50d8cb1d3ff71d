"""Weights: bytes from one memory to others, without copies on the way that are not needed.

    trainer ──copy──▶ arena (memfd) ──seal──▶ version (n, digest) ──open──▶ rollout maps it read-only
                          ▲                        │
              another relay's chunks            next relay

One relay a host holds versions in arenas and hands them over a Unix socket as file descriptors. Invariants:

1. A version is immutable: it is sealed only once nobody else can write into its arena, and the arena is used
   again only once nobody else has it open or mapped (the kernel says so, whatever died and however).
2. Same tensors, same bytes, same digest: the layout is canonical, gaps between tensors are zero.
3. Nobody waits for a reader: if no arena is free, the relay skips a version.
"""

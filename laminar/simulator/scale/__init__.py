"""`laminar simulate cluster.toml`: a job on a cluster that one does not have yet, under Laminar and its alternatives.

    cluster.toml ──settings──▶ Job: costs (model, GPU, tables), lengths, split of the GPUs
                                │
              ┌─────────────────┼──────────────────────────┐
        barriers.py         flowing.py                  real.py
        in turns, one step  partial rollout, Laminar    Laminar: the workers themselves,
        stale, streamed     as decisions and events     a decode step's tokens at a time
              └─────────────────┼──────────────────────────┘
                             Outcome ──▶ table, JSON, PNG

What is the workers' own code here, called as it is: the plan of repack (`workers.repack.plan`), what is to be expected
of a length (`workers.rollouts.reporting.Lengths`), when a rollout draws, drains, loads or swaps
(`workers.rollouts.steering.steer`), how much it may draw (`buffer.claims.admitted_groups`, `draw_size`), and which
groups a step means (`buffer.sampler.select`). The plan is asked without the manager's limit on how many rollouts it
empties (`work`: what is left to draw): where little is, the model moves more than the workers would.

What `flowing.py` models: the engine (a fluid, `engine.py`), time (`costs.py`), and what the protocol takes: a report
is as new as the plan that reads it, a draw, a finish and a commit take no time, a hand-over takes
`repack.HAND_OVER_S`. Deaths, rests, evaluation and checkpoints do not happen. `real.py` has none of these
simplifications but the engine, training and time: it runs rollouts, trainer, relay, manager and committer on the twins
of etcd and storage. Its tokens are grains of `max_tokens / 64` each, 256 by default (`real_engine.Grain`), so that what
the workers count of them is as coarse. A test holds the two together on a small cluster.

The baselines are policies of the same engine, costs and lengths.
"""

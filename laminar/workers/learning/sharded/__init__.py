"""A learner of several processes on one host, one a device: parameters, gradients and optimizer are sharded (FSDP2).

    trainer worker                         rank processes 1 .. n - 1
    LeadingLearner (rank 0) ──frames──▶ ShardedLearner         `wire`: JSON and Arrow over pipes, no pickle
          └──── collectives: gather weights, sum gradients ────┘

The ranks hold nothing that a restart needs: when one dies, the trainer ends with it and is begun again from the store.
"""

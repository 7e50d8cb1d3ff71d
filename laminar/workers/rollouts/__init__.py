"""The parts of the rollout worker: a trajectory's life, its ways out, which weights, and what it tells of itself."""

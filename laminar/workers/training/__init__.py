"""The parts of the trainer worker around the learner: what it sees, decides, publishes, checkpoints and replays."""

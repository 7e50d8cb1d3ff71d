"""The parts of the manager: who takes over what, what is cleaned, which tails move, and who is too slow."""

"""The trainer: sharded steps, data that can be resumed, checkpoints that survive."""

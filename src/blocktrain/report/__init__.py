"""What a run costs, counted and measured: memory of a worker and of the full stack, speed of the inner loop."""

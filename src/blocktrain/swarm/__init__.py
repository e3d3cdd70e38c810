"""Training over a network: rules of rounds first, the hosts that carry them later."""

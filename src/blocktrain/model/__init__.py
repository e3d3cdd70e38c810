"""The network: layers, blocks, the interface they share, and the counting reference. Knows no diffusion and no training."""

"""Where the network and the diffusion mathematics meet: data, objective, inner loop, checkpoints, composition, evaluation."""

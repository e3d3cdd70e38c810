"""Noise levels, preconditioning and the sweep: diffusion mathematics that knows no model."""

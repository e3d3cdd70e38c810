"""BlockTrain: train and serve one language model on machines that each hold only one block of it."""

__version__ = "0.1.0"

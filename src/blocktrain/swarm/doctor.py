"""What is wrong with a machine or its way to a coordinator."""

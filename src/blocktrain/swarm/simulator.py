"""Many workers under a virtual clock."""

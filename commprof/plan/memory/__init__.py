"""The memory of a rank beside its states: activations and the peak."""

"""What zero_runtime's experimental collectives send: compressed, delayed, or along the axes of a grid."""

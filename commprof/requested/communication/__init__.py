"""The messages of zero_runtime's experimental collectives: compressed, delayed, or along the axes of a grid."""

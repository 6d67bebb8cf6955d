"""ZeRO stage 3: parameters in slices, whole only while a module uses them."""

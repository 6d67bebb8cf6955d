"""Who comes late: arrivals, lateness, slow paths, and the verdict on them."""

"""What frameworks that know nothing of commprof would have said through its hooks, said for them."""

"""What the appliance needs of its host: shared memory, sockets, resources."""

"""Pass 3, rewire: a cached graph derived from the edited one."""

"""Two CPU devices for every test, set before JAX starts."""

import turbanet

turbanet.use_cores(2)

//! Cloud and edge in this process, on loopback sockets with ports of their own.

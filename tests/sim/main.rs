//! The tunnel layer under simulated time and a hostile scheduler.

//! The CONNECT front end.

mod head;

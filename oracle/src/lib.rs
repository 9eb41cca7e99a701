//! Nothing: what is here are tests, beside programs by others that need a newer compiler than the workspace.

#![forbid(unsafe_code)]

//! Empty: makes Cargo unify build dependencies too.

fn main() {}

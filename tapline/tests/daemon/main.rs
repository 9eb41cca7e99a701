//! `tapline` and the client of the API: against a daemon that plays recorded answers, and against `taplined` itself.

mod follow;
mod nouns;
mod objects;
mod play;
mod remote;
mod taplined;
mod terminal;
mod upgrade;
mod waiting;

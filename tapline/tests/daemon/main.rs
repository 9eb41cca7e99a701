//! Tests of `tapline` and the API client, with a daemon that plays recorded responses and with `taplined` itself.

mod archive;
mod console;
mod follow;
mod health;
mod labels;
mod libvirt_hook;
mod mistakes;
mod names;
mod nouns;
mod objects;
mod play;
mod remote;
mod screens;
mod story;
mod taplined;
mod tasks;
mod terminal;
mod top;
mod upgrade;
mod vm_snapshot;
mod waiting;

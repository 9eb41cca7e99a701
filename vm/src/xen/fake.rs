//! A guest and its disk in a store of our own, for tests of what is done with them.

use std::io::{self, Read};
use std::process::{Child, Command, Stdio};

use xen::fake::{FakeStore, Host};
use xen::{DomId, Store};

use super::claim::Places;
use super::device::Device;
use super::give::Wish;

/// What a disk is that its guest may write to.
pub const WRITABLE: Wish = Wish { read_only: false, kept: false };

/// A machine with a guest, and the disk it shall have.
pub fn machine() -> (Host, FakeStore, Device) {
    let made = || -> io::Result<(Host, FakeStore)> {
        let host = Host::new()?;
        let store = host.store(DomId(0))?;
        Ok((host, store))
    };
    let (host, mut store) = made().expect("memory for a fake host");
    write(&mut store, "/local/domain/0/name", "Domain-0");
    write(&mut store, "/local/domain/7/name", "vm");
    let device =
        Device { own: DomId(0), kind: "tapline".into(), guest: DomId(7), vdev: super::vdev::Vdev::of_number(51728) };
    (host, store, device)
}

/// Sets the state of one end.
pub fn say(store: &mut FakeStore, node: &str, state: &str) {
    write(store, &format!("{node}/state"), state);
}

fn write(store: &mut FakeStore, path: &str, value: &str) {
    store.write(None, path, value.as_bytes()).expect("the fake store takes this");
}

/// A process that claims a disk and serves nothing.
pub fn stand_in(places: &Places, device: &Device) -> io::Result<Child> {
    std::fs::create_dir_all(&places.run)?;
    let script = "exec 9<>\"$0\"; flock 9; echo $$ >\"$0\"; echo ready; exec sleep 1000";
    let mut command = Command::new("sh");
    let mut child = command.arg("-c").arg(script).arg(places.lock(device)).stdout(Stdio::piped()).spawn()?;
    if let Some(stdout) = &mut child.stdout {
        stdout.read_exact(&mut [0; 6])?;
    }
    Ok(child)
}

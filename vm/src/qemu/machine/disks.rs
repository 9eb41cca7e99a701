//! Disks of a running machine: plugged and unplugged one by one.
//!
//! Invariant: a failed plug leaves nothing behind, or says what; an unplug is done when the guest has released the
//! disk, and not earlier. Steps of a plug: the chardev (chardev-add), then the device (device_add); of an unplug: the
//! guest receives the request (device_del), releases the disk (DEVICE_DELETED), and the chardev is removed. After a
//! crash in between, [`QemuVm::disks`] shows what exists, and the next plug removes a chardev without a device.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::super::command_line::{disk_chardev, disk_device, disk_name, position_of};
use super::super::hardware::Disk;
use super::super::served;
use super::super::slots::Position;
use super::super::version::Version;
use super::error::{MachineError, monitor};
use super::{COMMAND, QemuVm, Status};
use crate::qmp::{Event, QmpError};

/// A guest whose system was not up yet has not received the request; QEMU accepts a repetition after five seconds.
const ASK_AGAIN: Duration = Duration::from_secs(6);

/// QEMU's event for a guest that says no.
const GUEST_REFUSES: &str = "DEVICE_UNPLUG_GUEST_ERROR";

/// For who serves a disk to answer that it does.
const SERVED: Duration = Duration::from_secs(10);

/// For a device that is gone to let go of its connection.
const LET_GO: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

impl QemuVm {
    /// The positions of the machine's disks, including those whose release is requested and pending.
    pub fn disks(&mut self) -> Result<Vec<Position>, MachineError> {
        let names = self.children("/machine/peripheral")?;
        let mut positions: Vec<Position> = names.iter().filter_map(|name| position_of(name)).collect();
        positions.sort_unstable();
        Ok(positions)
    }

    /// Plugs a disk. It must be served and stay so: QEMU, with the guest, is blocked until it has negotiated with the
    /// server.
    pub fn plug(&mut self, disk: &Disk) -> Result<(), MachineError> {
        disk.check()?;
        let number = disk.position.number();
        if self.disks()?.contains(&disk.position) {
            return Err(MachineError::Taken(number));
        }
        let chardev = disk_chardev(disk.position);
        if self.children("/chardevs")?.contains(&chardev) {
            // The guest released an earlier disk after its unplug had timed out; the chardev still exists.
            self.remove_chardev(&chardev)?;
        }
        see_served(disk)?;
        let address = json!({ "type": "unix", "data": { "path": disk.socket.to_string_lossy() } });
        let (reconnect, after) = self.version()?.reconnect().property();
        let data = json!({ "addr": address, "server": false, reconnect: after });
        let arguments = json!({ "id": chardev, "backend": { "type": "socket", "data": data } });
        self.command(&format!("plug disk {number}"), "chardev-add", &arguments)?;
        let device: Map<String, Value> =
            disk_device(disk, self.vcpus).into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let Err(refused) = self.client.execute("device_add", &Value::Object(device), COMMAND) else { return Ok(()) };
        // QEMU executes commands in order: what it has now is the outcome of one that it has not answered in time.
        if refused.is_late() && self.disks()?.contains(&disk.position) {
            return Ok(());
        }
        if refused.is_gone() {
            return Err(self.explained(format!("plug disk {number}"), refused));
        }
        match self.client.execute("chardev-remove", &json!({ "id": chardev }), COMMAND) {
            Ok(_) => Err(monitor(format!("plug disk {number}"))(refused)),
            Err(undo) => Err(MachineError::HalfPlugged { position: number, undo: undo.to_string(), source: refused }),
        }
    }

    /// Requests the release of a disk from the guest and waits for it, for at most `patience`. A disk that does not
    /// exist counts as unplugged.
    pub fn unplug(&mut self, position: Position, patience: Duration) -> Result<(), MachineError> {
        let began = Instant::now();
        self.begin_unplug(position)?;
        while !self.finish_unplug(position)? {
            let left = patience.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(MachineError::Held { position: position.number(), after: patience });
            }
            match self.event_about(position, left.min(ASK_AGAIN))? {
                Some(event) if event.name == GUEST_REFUSES => return Err(MachineError::Refused(position.number())),
                Some(_) => {}
                None => self.begin_unplug(position)?,
            }
        }
        Ok(())
    }

    /// Requests the release of a disk from the guest, without waiting: `finish_unplug` checks later whether it is
    /// released.
    pub fn begin_unplug(&mut self, position: Position) -> Result<(), MachineError> {
        // An event about an earlier disk at this position is not an answer.
        while self.event_about(position, Duration::ZERO)?.is_some() {}
        if !self.disks()?.contains(&position) {
            return Ok(());
        }
        match self.client.execute("device_del", &json!({ "id": disk_name(position) }), COMMAND) {
            Ok(_) => Ok(()),
            Err(error) if error.is_refusal("DeviceNotFound") || is_under_way(&error) => Ok(()),
            Err(error) => Err(self.explained(format!("unplug disk {}", position.number()), error)),
        }
    }

    /// Whether the guest has released a disk; if so nothing of it is left in QEMU, and its server may exit.
    pub fn finish_unplug(&mut self, position: Position) -> Result<bool, MachineError> {
        if self.disks()?.contains(&position) {
            let said = self.event_about(position, Duration::ZERO)?;
            let refused = said.is_some_and(|event| event.name == GUEST_REFUSES);
            return if refused { Err(MachineError::Refused(position.number())) } else { Ok(false) };
        }
        let chardev = disk_chardev(position);
        if self.children("/chardevs")?.contains(&chardev) {
            self.remove_chardev(&chardev)?;
        }
        Ok(true)
    }

    /// Whether the guest's driver has started a disk to whose server QEMU is not connected. This is temporarily so
    /// while a dead server is being replaced; and permanently if the server died at the very moment when the driver
    /// started the disk: QEMU before 9.1 never retries such a connection. Versions before 7.2 do not report it.
    pub fn has_lost(&mut self, position: Position) -> Result<bool, MachineError> {
        // While a guest is paused, so are its disks.
        if self.status()? != Status::Running || !self.disks()?.contains(&position) {
            return Ok(false);
        }
        let path = format!("/machine/peripheral/{}/virtio-backend", disk_name(position));
        let device = match self.client.execute("x-query-virtio-status", &json!({ "path": path }), COMMAND) {
            Err(error) if error.is_refusal("CommandNotFound") => return Ok(false),
            other => other.map_err(|error| self.explained(format!("query disk {}", position.number()), error))?,
        };
        let status = device["status"]["statuses"].as_array().into_iter().flatten();
        let started = status.filter_map(Value::as_str).any(|word| word.starts_with("VIRTIO_CONFIG_S_DRIVER_OK"));
        Ok(started && device["vhost-dev"].is_null())
    }

    /// The version of its QEMU: an adopted machine may have been started with another than the installed one.
    pub(super) fn version(&mut self) -> Result<Version, MachineError> {
        let answer = self.command("query its version", "query-version", &json!({}))?;
        Ok(Version::told(&answer).unwrap_or(Version::OLDEST))
    }

    /// The next event about a disk, within `patience`.
    fn event_about(&mut self, position: Position, patience: Duration) -> Result<Option<Event>, MachineError> {
        let name = disk_name(position);
        let is_about = |event: &Event| {
            let of_unplug = matches!(event.name.as_str(), "DEVICE_DELETED" | GUEST_REFUSES);
            of_unplug && event.data.get("device").and_then(Value::as_str) == Some(&name)
        };
        let event = self.client.wait_event(patience, is_about);
        event.map_err(|error| self.explained(format!("unplug disk {}", position.number()), error))
    }

    /// Removes a chardev. The device that had it is no longer among the machine's, and releases it when QEMU's last
    /// reader has (RCU), which is a moment later.
    fn remove_chardev(&mut self, chardev: &str) -> Result<(), MachineError> {
        let deadline = Instant::now() + LET_GO;
        loop {
            match self.client.execute("chardev-remove", &json!({ "id": chardev }), COMMAND) {
                Ok(_) => return Ok(()),
                Err(error) if is_busy(&error) && Instant::now() < deadline => std::thread::sleep(LOOK_AGAIN),
                Err(error) => return Err(self.explained(format!("remove the connection {chardev}"), error)),
            }
        }
    }

    /// The names of the children of a path in QEMU's object tree.
    fn children(&mut self, path: &str) -> Result<Vec<String>, MachineError> {
        let what = format!("list {path}");
        let listed = self.command(&what, "qom-list", &json!({ "path": path }))?;
        let children = listed.as_array().into_iter().flatten();
        let is_child = |child: &&Value| child["type"].as_str().is_some_and(|kind| kind.starts_with("child<"));
        Ok(children.filter(is_child).filter_map(|child| child["name"].as_str().map(str::to_owned)).collect())
    }
}

/// Checks that the disk is served, before QEMU waits for it.
pub(super) fn see_served(disk: &Disk) -> Result<(), MachineError> {
    let position = disk.position.number();
    served::ask(&disk.socket, SERVED).map_err(|source| MachineError::NotServed { position, source })
}

/// A device holds the connection.
fn is_busy(error: &QmpError) -> bool {
    matches!(error, QmpError::Refused { description, .. } if description.ends_with("is busy"))
}

/// The request was sent a moment ago; QEMU rejects a repetition within five seconds.
fn is_under_way(error: &QmpError) -> bool {
    matches!(error, QmpError::Refused { description, .. } if description.contains("already in the process of unplug"))
}

//! Lists the disks that this domain serves to guests, with the states of both ends.
//!
//! It reads xenstore and changes nothing. Text that a guest may have written is shown without terminal control
//! characters.

use control::{Error, printable};
use serde::Serialize;
use xen::{DomId, Store};

use vm::xen::device::{Device, children, described, text};
use vm::xen::domain;

/// A disk. Names and meanings of the fields are part of the JSON interface.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct ListedDisk {
    domain: u16,
    /// `None` if the domain no longer exists.
    name: Option<String>,
    vdev: String,
    number: u32,
    /// The backend's name in xenstore.
    kind: String,
    mode: Option<String>,
    /// `Connected`, `Closed`, …, or `gone`.
    backend_state: String,
    guest_state: String,
    /// Written by Tapline's disk process, as are the next two; `None` for another program's backend.
    image: Option<String>,
    control: Option<String>,
    pid: Option<u32>,
    /// The backend's error message.
    error: Option<String>,
}

/// All disks, or those of one guest, whichever program serves them.
pub fn all(store: &mut dyn Store, own: DomId, only: Option<DomId>) -> Result<Vec<ListedDisk>, Error> {
    let mut all = Vec::new();
    for kind in children(store, None, &format!("/local/domain/{own}/backend"))? {
        for guest in children(store, None, &format!("/local/domain/{own}/backend/{kind}"))? {
            let Ok(domain) = guest.parse().map(DomId) else { continue };
            if only.is_some_and(|only| only != domain) {
                continue;
            }
            for number in children(store, None, &format!("/local/domain/{own}/backend/{kind}/{guest}"))? {
                let device = Device::of_backend(&format!("/local/domain/{own}/backend/{kind}/{guest}/{number}"));
                if let Some(device) = device {
                    all.extend(describe(store, &device)?);
                }
            }
        }
    }
    all.sort_by(|a, b| (a.domain, a.number, &a.kind).cmp(&(b.domain, b.number, &b.kind)));
    Ok(all)
}

/// Describes a device; `None` if it is not a disk.
fn describe(store: &mut dyn Store, device: &Device) -> Result<Option<ListedDisk>, Error> {
    let node = device.backend();
    let mut value = |key: &str| {
        let value = text(store, None, &format!("{node}/{key}"));
        value.map(|value| value.map(|value| printable(&value)))
    };
    if value("frontend")?.is_none_or(|frontend| frontend != device.frontend()) {
        return Ok(None);
    }
    let (mode, image, control) = (value("mode")?, value("tapline/image")?, value("tapline/control")?);
    let pid = value("tapline/pid")?.and_then(|pid| pid.parse().ok());
    let error = text(store, None, &format!("{}/error", device.complaint()))?.map(|error| printable(&error));
    let (backend, guest) = device.states(store, None)?;
    Ok(Some(ListedDisk {
        domain: device.guest.0,
        name: domain::name(store, device.guest)?.map(|name| printable(&name)),
        vdev: device.vdev.to_string(),
        number: device.vdev.number(),
        kind: device.kind.clone(),
        mode,
        backend_state: described(backend),
        guest_state: described(guest),
        image,
        control,
        pid,
        error,
    }))
}

/// Formats disks as a table, with the error of a disk below its row.
pub fn table(all: &[ListedDisk]) -> String {
    let heading = ["DOMAIN", "NAME", "VDEV", "MODE", "BACKEND", "STATE", "GUEST", "IMAGE", "CONTROL"];
    let mut rows = vec![heading.map(str::to_owned)];
    for disk in all {
        let or_dash = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
        rows.push([
            disk.domain.to_string(),
            or_dash(&disk.name),
            disk.vdev.clone(),
            or_dash(&disk.mode),
            disk.kind.clone(),
            disk.backend_state.clone(),
            disk.guest_state.clone(),
            or_dash(&disk.image),
            or_dash(&disk.control),
        ]);
    }
    let mut widths = [0; 9];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |row: &[String; 9]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}\n", cells.collect::<Vec<String>>().join("  ").trim_end())
    };
    let error =
        |disk: &ListedDisk| disk.error.as_ref().map(|error| format!("  {}: {error}\n", disk.vdev)).unwrap_or_default();
    let errors = std::iter::once(String::new()).chain(all.iter().map(error));
    rows.iter().map(line).zip(errors).map(|(line, error)| line + &error).collect()
}

#[cfg(test)]
mod test {
    use super::*;
    use vm::xen::fake::{WRITABLE, machine, say};
    use vm::xen::give::announce;

    #[test]
    fn disks_are_listed_with_the_states_of_both_ends() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        let first = Device { vdev: "xvda".parse().unwrap(), kind: "qdisk".into(), ..device.clone() };
        announce(&mut store, &first, WRITABLE).unwrap();
        store.write(None, "/local/domain/0/backend/vif/7/0/frontend", b"/local/domain/7/device/vif/0").unwrap();
        store.write(None, &format!("{}/tapline/image", device.backend()), b"vhd:/a.vhd").unwrap();
        say(&mut store, &device.backend(), "2");
        let listed = all(&mut store, DomId(0), None).unwrap();
        let shown: Vec<_> = listed.iter().map(|disk| (disk.vdev.as_str(), disk.kind.as_str())).collect();
        assert_eq!(shown, [("xvda", "qdisk"), ("xvdb", "tapline")]);
        let lines = table(&listed);
        assert_eq!(
            lines.lines().last().unwrap(),
            "7       vm    xvdb  w     tapline  InitWait      Initialising  vhd:/a.vhd  -"
        );
        assert_eq!(all(&mut store, DomId(0), Some(DomId(8))).unwrap(), []);
    }

    #[test]
    fn a_disks_error_is_shown_below_it() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        store.write(None, &format!("{}/error", device.complaint()), b"22 its keys cannot be used").unwrap();
        let listed = table(&all(&mut store, DomId(0), None).unwrap());
        assert_eq!(listed.lines().last(), Some("  xvdb: 22 its keys cannot be used"));
        // It is removed with the device.
        vm::xen::take::remove(&mut store, &device).unwrap();
        assert_eq!(store.list(None, "/local/domain/0/error/backend/tapline").unwrap(), Some(Vec::new()));
    }

    #[test]
    fn names_in_xenstore_cannot_control_a_terminal() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        store.write(None, "/local/domain/7/name", b"\x1b[2J").unwrap();
        assert!(!table(&all(&mut store, DomId(0), None).unwrap()).contains('\x1b'));
    }
}

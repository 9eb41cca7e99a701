//! Takes over a disk that xl has created for its own backend, before its guest has run.
//!
//! xl calls a block script when the kernel's backend waits for its device. In one transaction that backend's node is
//! removed, which makes the kernel release the disk, and the guest's frontend is recreated with our backend. It knows
//! nothing about images but their names. Invariant: a guest that has begun to use the disk is not touched.

use control::{Error, ImageName};
use xen::{Store, Transaction};

use super::device::{Device, State, described, remove_own_end, store_failed, text, together, write_all};
use super::give::{Wish, make_both_ends};

/// Keys that xl has written into either end and that are not ours to decide.
const XLS: [&str; 4] = ["removable", "bootable", "discard-enable", "direct-io-safe"];
const XLS_OF_GUEST: [&str; 1] = ["trusted"];

/// The disk's settings in xl's configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The device after the takeover.
    pub device: Device,
    /// The image and its parents.
    pub images: Vec<ImageName>,
    /// The guest's access to it.
    pub wish: Wish,
}

/// Makes the device at `node` one of the backend `kind`.
pub fn adopt(store: &mut dyn Store, node: &str, kind: &str) -> Result<Adopted, Error> {
    let theirs = Device::of_backend(node).ok_or_else(|| not_a_disk(node))?;
    together(store, |store, within| {
        let (images, wish) = read_wish(store, within, node)?;
        let guest = theirs.states(store, within)?.1;
        // libxl creates a new domain's disks first and its console later. The driver of a running guest already knows
        // the kernel's backend, but writes its state too late.
        let console = format!("/local/domain/{}/console/ring-ref", theirs.guest);
        if guest != Some(State::INITIALISING) || text(store, within, &console)?.is_some() {
            let why = format!("its guest is running: its frontend is {}", described(guest));
            let images: Vec<String> = images.iter().map(ImageName::to_string).collect();
            let by = format!("tapline xen attach {} {}", theirs.guest, images.join(" "));
            return Err(Error::cannot(format!("take {theirs} over from xl"), why)
                .advise(format!("to give a running guest its disk, use: {by}")));
        }
        let device = Device { kind: kind.to_owned(), ..theirs.clone() };
        let (kept, of_guest) = (values(store, within, node, &XLS)?, theirs.frontend());
        let kept_of_guest = values(store, within, &of_guest, &XLS_OF_GUEST)?;
        remove_own_end(store, within, &theirs)?;
        make_both_ends(store, within, &device, wish)?;
        for (node, kept) in [(device.backend(), kept), (of_guest, kept_of_guest)] {
            let kept: Vec<(&str, &str)> = kept.iter().map(|(key, value)| (*key, value.as_str())).collect();
            write_all(store, within, &node, &kept)?;
        }
        write_all(store, within, &device.of_xl(), &[("backend", &device.backend())])?;
        Ok(Adopted { device, images, wish })
    })
}

/// The disk's settings in xl's configuration at `node`.
pub fn read_wish(
    store: &mut dyn Store,
    within: Option<Transaction>,
    node: &str,
) -> Result<(Vec<ImageName>, Wish), Error> {
    let mut value = |key: &str| text(store, within, &format!("{node}/{key}"));
    let params = value("params")?.ok_or_else(|| not_a_disk(node))?;
    let mode = value("mode")?.unwrap_or_default();
    Ok((images(&params)?, Wish { read_only: !mode.contains('w'), kept: false }))
}

/// The existing values below a node.
pub fn values(
    store: &mut dyn Store,
    within: Option<Transaction>,
    node: &str,
    keys: &[&'static str],
) -> Result<Vec<(&'static str, String)>, Error> {
    let mut found = Vec::new();
    for &key in keys {
        if let Some(value) = text(store, within, &format!("{node}/{key}"))? {
            found.push((key, value));
        }
    }
    Ok(found)
}

/// Leaves to xl why it cannot have the disk.
pub fn refuse(store: &mut dyn Store, node: &str, adopted: Option<&Adopted>, why: &Error) -> Result<(), Error> {
    together(store, |store, within| -> Result<(), Error> {
        if let Some(Adopted { device, .. }) = adopted {
            store.remove(within, &device.frontend()).map_err(store_failed)?;
            store.remove(within, &device.backend()).map_err(store_failed)?;
            write_all(store, within, &device.of_xl(), &[("backend", node)])?;
        }
        write_all(store, within, node, &[("hotplug-error", &why.with_advice()), ("hotplug-status", "error")])
    })
}

/// `target=` of a disk in xl's configuration: image names with blanks between them.
fn images(params: &str) -> Result<Vec<ImageName>, Error> {
    let images = params.split_whitespace().map(str::parse);
    let images: Result<Vec<ImageName>, _> = images.collect();
    let images = images.map_err(|error| Error::cannot(format!("parse target={params}"), error))?;
    if images.is_empty() {
        return Err(Error::cannot("find an image in the disk's configuration", "target= has none")
            .advise("write target=FORMAT:PATH as the last word, followed by its parents"));
    }
    Ok(images)
}

/// The error for a node that xl has not created for a disk.
pub fn not_a_disk(node: &str) -> Error {
    Error::cannot(format!("take over {node}"), "xl has no disk there")
        .advise("this command is for block-tapline, which xl calls: script=block-tapline in a disk's configuration")
}

#[cfg(test)]
mod test {
    use super::super::fake::{WRITABLE, machine, say};
    use super::super::{give::announce, take};
    use super::*;

    /// A disk as xl leaves it to its script.
    fn of_xl() -> (xen::fake::Host, xen::fake::FakeStore, Device) {
        let (host, mut store, device) = machine();
        let theirs = Device { kind: "vbd".into(), ..device };
        announce(&mut store, &theirs, WRITABLE).unwrap();
        say(&mut store, &theirs.backend(), "2");
        let params = b"qcow2:/a.qcow2 raw:/base.raw";
        store.write(None, &format!("{}/params", theirs.backend()), params).unwrap();
        store.write(None, &format!("{}/backend", theirs.of_xl()), theirs.backend().as_bytes()).unwrap();
        (host, store, theirs)
    }

    #[test]
    fn a_disk_of_a_new_guest_is_taken_over() {
        let (_host, mut store, theirs) = of_xl();
        let adopted = adopt(&mut store, &theirs.backend(), "tapline").unwrap();
        assert_eq!(adopted.images, ["qcow2:/a.qcow2".parse().unwrap(), "raw:/base.raw".parse().unwrap()]);
        assert_eq!(adopted.wish, WRITABLE);
        assert_eq!(store.list(None, "/local/domain/0/backend/vbd").unwrap(), Some(Vec::new()), "no empty node is left");
        let ours = adopted.device.backend();
        for node in [theirs.frontend(), theirs.of_xl()] {
            assert_eq!(text(&mut store, None, &format!("{node}/backend")).unwrap().as_ref(), Some(&ours), "{node}");
        }
        // It is detached like our own disks, and xl forgets it.
        take::refuse_xls(&mut store, &adopted.device).unwrap();
        take::remove(&mut store, &adopted.device).unwrap();
        assert_eq!(store.read(None, &theirs.of_xl()).unwrap(), None);
    }

    #[test]
    fn xls_settings_of_the_disk_are_kept() {
        let (_host, mut store, theirs) = of_xl();
        write_all(&mut store, None, &theirs.backend(), &[("discard-enable", "0"), ("direct-io-safe", "1")]).unwrap();
        write_all(&mut store, None, &theirs.frontend(), &[("trusted", "0"), ("ring-ref", "8")]).unwrap();
        let ours = adopt(&mut store, &theirs.backend(), "tapline").unwrap().device;
        let mut value = |node: String, key: &str| text(&mut store, None, &format!("{node}/{key}")).unwrap();
        assert_eq!(value(ours.backend(), "discard-enable").as_deref(), Some("0"));
        assert_eq!(value(ours.backend(), "direct-io-safe").as_deref(), Some("1"));
        assert_eq!(value(ours.frontend(), "trusted").as_deref(), Some("0"));
        assert_eq!(value(ours.frontend(), "ring-ref"), None);
        // Nor can a toolstack create both ends of a device that is already waiting.
        announce(&mut store, &ours, WRITABLE).unwrap_err();
        store.remove(None, &ours.frontend()).unwrap();
        store.remove(None, &ours.of_xl()).unwrap();
        announce(&mut store, &ours, WRITABLE).unwrap();
        let discard = text(&mut store, None, &format!("{}/discard-enable", ours.backend())).unwrap();
        assert_eq!(discard.as_deref(), Some("0"));
    }

    #[test]
    fn a_running_guest_is_not_touched() {
        let (_host, mut store, theirs) = of_xl();
        say(&mut store, &theirs.frontend(), "3");
        let failure = adopt(&mut store, &theirs.backend(), "tapline").unwrap_err();
        assert!(failure.message.contains("its guest is running: its frontend is Initialised"), "{failure}");
        assert!(store.read(None, &theirs.backend()).unwrap().is_some());
    }

    #[test]
    fn a_running_guest_without_driver_is_recognized_by_its_console() {
        let (_host, mut store, theirs) = of_xl();
        store.write(None, "/local/domain/7/console/ring-ref", b"1").unwrap();
        assert!(adopt(&mut store, &theirs.backend(), "tapline").unwrap_err().message.contains("its guest is running"));
        assert!(store.read(None, &theirs.backend()).unwrap().is_some());
    }

    #[test]
    fn xl_gets_the_reason_and_its_disk_is_unchanged() {
        let (_host, mut store, theirs) = of_xl();
        let adopted = adopt(&mut store, &theirs.backend(), "tapline").unwrap();
        refuse(&mut store, &theirs.backend(), Some(&adopted), &Error::cannot("open it", "no")).unwrap();
        let error = text(&mut store, None, &format!("{}/hotplug-error", theirs.backend())).unwrap();
        assert_eq!(error.as_deref(), Some("cannot open it: no"));
        let backend = text(&mut store, None, &format!("{}/backend", theirs.of_xl())).unwrap();
        assert_eq!(backend, Some(theirs.backend()));
        assert_eq!(store.read(None, &adopted.device.backend()).unwrap(), None);
    }

    #[test]
    fn a_target_without_format_is_refused_with_a_suggestion() {
        let (_host, mut store, theirs) = of_xl();
        store.write(None, &format!("{}/params", theirs.backend()), b"/dev/vg/a").unwrap();
        assert!(adopt(&mut store, &theirs.backend(), "tapline").unwrap_err().message.contains("use raw:/dev/vg/a"));
        assert!(adopt(&mut store, "/local/domain/0/backend/vbd/9/51712", "tapline").is_err());
    }
}

//! Chooses how QEMU runs the guest: by KVM where that really works, otherwise by emulation (TCG).
//!
//! A /dev/kvm that can be opened proves nothing (nested and filtered KVMs exist), so the guest itself is booted once.
//! The result is cached until the host boots again.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use vm::qemu::accelerator::Accelerator;

use super::{Guest, GuestError, Job, at};

/// Chooses KVM if `guest` boots with it on this host.
pub fn choose(guest: &Guest, cache: &Path) -> Result<Accelerator, GuestError> {
    if fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return Ok(Accelerator::Tcg);
    }
    let verdict_file = cache.join("accelerator");
    // An unreadable boot ID only means that the test is repeated.
    let machine = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let said = fs::read_to_string(&verdict_file).unwrap_or_default();
    match said.strip_prefix(&machine).map(str::trim) {
        Some("kvm") => return Ok(Accelerator::Kvm),
        Some("tcg") => return Ok(Accelerator::Tcg),
        _ => {}
    }
    let works = boots_under_kvm(guest, cache)?;
    let (accelerator, verdict) = if works { (Accelerator::Kvm, "kvm") } else { (Accelerator::Tcg, "tcg") };
    fs::write(&verdict_file, format!("{machine}{verdict}\n")).map_err(at("write", &verdict_file))?;
    Ok(accelerator)
}

/// Whether the guest boots and completes an empty job. Under a working KVM this takes two seconds.
fn boots_under_kvm(guest: &Guest, cache: &Path) -> Result<bool, GuestError> {
    let (kernel, initramfs, qemu) = (guest.kernel.clone(), guest.initramfs.clone(), guest.qemu.clone());
    let trial = Guest { kernel, initramfs, accelerator: Accelerator::Kvm, qemu };
    let work = cache.join(format!("trial.{}", std::process::id()));
    fs::create_dir_all(&work).map_err(at("create", &work))?;
    let job = Job { name: "trial", script: "", parameters: Vec::new() };
    let running = trial.boot(&job, &[], &work)?.silent_for_at_most(20);
    let outcome = running.follow(|_| Ok::<_, GuestError>(ControlFlow::Continue(())));
    fs::remove_dir_all(&work).map_err(at("remove", &work))?;
    Ok(outcome.is_ok())
}

//! Checks the images when guest and disk process are dead: the files alone, as after a power loss of the host; and with
//! the state that the process left in memory, as the next one would find it.
//!
//! Uses the commands for images. The originals are checked last, because a check changes them.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::progress::Progress;
use crate::tool;

use super::records::Records;
use super::{Failure, chain};

/// Checks that everything is there.
pub fn perform(
    program: &Path,
    work: &Path,
    redo: &Path,
    records: &Records,
    progress: &Progress,
) -> Result<(), Failure> {
    // Copies are other files, for which there is no redo log. Data that was fsynced needs none.
    let copies = work.join("after-power-loss");
    fs::create_dir(&copies).map_err(Failure::file("create", &copies))?;
    let layers = chain::of(work).map_err(Failure::file("look for images in", work))?;
    for layer in &layers {
        // A layer records when its parent was last changed, so times are preserved.
        let words = ["--preserve=timestamps", "--sparse=always", layer];
        tool::text(Command::new("cp").args(words).arg(&copies).current_dir(work))?;
    }
    for (place, what) in [(copies.as_path(), "by the files alone"), (work, "with the redo logs")] {
        let images = Images { program, place, redo };
        // A killed process leaks clusters (status 5); damage ends the run.
        match images.run(&["check"], &layers, &[]) {
            Err(Failure::Tool(tool::ToolError::Failed { status, .. })) if status.code() == Some(5) => {}
            checked => drop(checked?),
        }
        let raw = place.join("disk.raw");
        images.run(&["convert"], &layers, &["raw:disk.raw"])?;
        let found = records.look_for_all(&raw).map_err(Failure::file("read", &raw))?;
        found.map_err(|wrong| Failure::Claim(format!("fsynced, and lost {what}: {wrong}")))?;
        images.compare_with_qemu(&layers)?;
        progress.holds(&format!("{what}: all of {} fsynced records are there", records.announced));
    }
    Ok(())
}

struct Images<'a> {
    program: &'a Path,
    place: &'a Path,
    redo: &'a Path,
}

impl Images<'_> {
    /// Runs `tapline-disk image VERB` on a chain.
    fn run(&self, verb: &[&str], layers: &[String], target: &[&str]) -> Result<String, Failure> {
        let mut command = Command::new(self.program);
        command.arg("image").args(verb).env("TAPLINE_REDO_DIR", self.redo).current_dir(self.place);
        for (depth, layer) in layers.iter().enumerate() {
            command.args((depth > 0).then_some("--parent")).arg(format!("qcow2:{layer}"));
        }
        Ok(tool::text(command.args(target))?)
    }

    /// QEMU must find nothing but leaks (status 3), and the same content.
    fn compare_with_qemu(&self, layers: &[String]) -> Result<(), Failure> {
        let Some(leaf) = layers.first() else { return Ok(()) };
        let mut check = Command::new("qemu-img");
        check.args(["check", "-q", "-f", "qcow2", leaf]).current_dir(self.place);
        match tool::text(&mut check) {
            Err(tool::ToolError::Failed { status, .. }) if status.code() == Some(3) => {}
            checked => drop(checked?),
        }
        let words = ["compare", "-f", "qcow2", "-F", "raw", leaf, "disk.raw"];
        tool::text(Command::new("qemu-img").args(words).current_dir(self.place))?;
        Ok(())
    }
}

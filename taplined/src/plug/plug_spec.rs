//! The specification of a disk to serve: a VBD, the files of its VDI, and the disk process's command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{ChangeTracking, LogicalBlockSize, Mode, Problem, Transport, Vbd};
use control::ImageName;
use repo::catalogue::Image;
use repo::driver::Directory;
use uuid::Uuid;

use super::queue::Request;
use super::xen_disk::XenDisk;
use crate::config::Plug;
use crate::daemon::Daemon;
use crate::disk::files::{self, Known, OpenFile};
use crate::disk::handing::Handing;
use crate::disk::limits;
use crate::disk::names::{image_name, words_of};
use crate::disk::paths::DiskPaths;
use crate::disk::redo::RedoLogs;
use crate::task::blocking;
use crate::vdi::record_changes::Recording;

/// Bytes of memory that every disk process needs while it starts.
const MEMORY_BASE: u64 = 4 << 20;

/// A process keeps [`MEMORY_OF_BLOCK`] bytes in each layer for each block of a VHD, of this size.
const BLOCK: u64 = 2 << 20;
const MEMORY_OF_BLOCK: u64 = 16;

/// The specification of a disk to serve.
#[derive(Clone, Debug)]
pub struct PlugSpec {
    /// The VBD.
    pub vbd: Vbd,
    /// The sector size for the guest; `None`: the disk process takes the storage's.
    block: Option<LogicalBlockSize>,
    /// The recording of its changed blocks, if it is enabled.
    tracking: Option<ChangeTracking>,
    /// From the top down.
    chain: Vec<Image>,
    /// The process's names for them.
    names: Vec<ImageName>,
    directory: Arc<Directory>,
    /// The disk's device in the domain of a Xen guest.
    pub disk: Option<XenDisk>,
    /// Command-line arguments for threads and CPUs.
    threads: Vec<OsString>,
    /// Injected delay of each operation, for tests.
    delay: Duration,
}

impl PlugSpec {
    /// Reads the specification of a VBD from the catalogue.
    pub async fn of(daemon: &Daemon, vbd: Uuid) -> Result<PlugSpec, Problem> {
        let found = daemon.catalogue.read(move |view| {
            let vbd = view.vbd(vbd)?;
            let (vdi, chain) = (view.vdi(vbd.vdi)?, view.chain(vbd.vdi)?);
            let disk = XenDisk::of(view, &vbd)?;
            Ok((vbd, vdi, chain, disk))
        });
        let (vbd, vdi, chain, disk) = found.await?;
        let directory = daemon.srs.directory(vdi.sr).await?;
        let delay = if daemon.config.plug.injected_delays { delay_in(vdi.name.as_str()) } else { Duration::ZERO };
        let names = chain.iter().map(|image| image_name(image.format, image.path(directory.path()))).collect();
        let threads = words_of_threads(&daemon.config.plug);
        let is_written = vbd.mode == Mode::ReadWrite;
        let tracking = vdi.cbt.filter(|tracking| tracking.enabled && is_written);
        Ok(PlugSpec { names, vbd, tracking, block: vdi.logical_block_size, chain, directory, disk, threads, delay })
    }

    /// The specification for a process that takes over the files of another: it uses that one's names for them.
    pub fn with_names(self, names: Vec<ImageName>) -> PlugSpec {
        PlugSpec { names, ..self }
    }

    /// The VBD as the queue sees it.
    pub fn request(&self) -> Request {
        let layers = self.chain.iter().map(|image| (image.size / BLOCK).saturating_mul(MEMORY_OF_BLOCK));
        let memory = layers.fold(MEMORY_BASE, u64::saturating_add);
        Request { vbd: self.vbd.uuid, vm: self.vbd.vm, mode: self.vbd.mode, memory }
    }

    fn path(&self, image: &Image) -> PathBuf {
        image.path(self.directory.path())
    }

    /// Opens the files: the top one for writing if the VBD may write, all others for reading; returns their
    /// identities. Refuses files that differ from those of the previous process (`before`); and, if that process had
    /// the top one open, refuses to serve without the redo log among `logs`.
    ///
    /// The third value is set if changes are recorded.
    pub async fn open(&self, before: Known, logs: RedoLogs) -> Result<(Handing, Known, Option<Recording>), Problem> {
        tokio::time::sleep(self.delay).await;
        let order = self.clone();
        let opened = blocking("open the files of a VDI", move || {
            let (mut handing, mut known, mut written, mut recording) = (Handing::default(), Known::new(), None, None);
            for (depth, image) in order.chain.iter().enumerate() {
                let write = depth == 0 && order.vbd.mode == Mode::ReadWrite;
                let failed = |error| Problem::failed("examine an image", error);
                let file = match order.tracking.as_ref().filter(|_| write) {
                    None => order.directory.open_image(&image.file, write)?,
                    Some(tracking) => {
                        let file = order.directory.open_marked(&image.file, true)?;
                        recording = Some(Recording {
                            vdi: order.vbd.vdi,
                            map: tracking.maps.last().copied(),
                            directory: order.directory.clone(),
                            image: file.try_clone().map_err(failed)?,
                        });
                        file
                    }
                };
                known.insert(image.file.clone(), OpenFile::held(&order.directory, &image.file, &file)?);
                if write && before.contains_key(&image.file) {
                    written = Some((order.path(image), file.metadata().map_err(failed)?));
                }
                handing.file(&order.path(image), write, file);
            }
            // Checked last: a missing file, which may come back, was reported above.
            files::must_be_those(&order.directory, &order.chain, &before, &files::again(&order.vbd))?;
            if let Some((path, image)) = written {
                logs.must_be_there(&path, &image)?;
            }
            Ok((handing, known, recording))
        });
        opened.await
    }

    /// Refuses files of a diverged VDI that have replaced those of the previous process.
    pub async fn must_be_those(&self, before: Known) -> Result<(), Problem> {
        let order = self.clone();
        let looked = blocking("examine the files of a VDI", move || {
            files::must_be_those(&order.directory, &order.chain, &before, &files::decided(&order.vbd))
        });
        looked.await
    }

    /// Whether the previous process had exactly the files of these names open.
    pub fn has_names_of(&self, before: &Known) -> bool {
        before.len() == self.chain.len() && self.chain.iter().all(|image| before.contains_key(&image.file))
    }

    /// The command-line arguments.
    pub fn words(&self, place: &DiskPaths) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["serve".into()];
        words.extend(words_of(self.names.iter().cloned()));
        match &self.disk {
            Some(disk) => words.extend(["--xen".into(), disk.word().into()]),
            None => {
                let transport = if self.vbd.transport == Transport::Nbd { "--nbd" } else { "--vhost-user" };
                words.extend([transport.into(), place.transport(self.vbd.transport).into()]);
            }
        }
        if self.vbd.for_nbd_address {
            words.extend(["--nbd-export".into(), self.vbd.vdi.to_string().into()]);
        }
        if self.vbd.transport == Transport::VhostUser {
            words.extend(["--serial".into(), serial(self.vbd.vdi).into()]);
        }
        words.extend(["--control".into(), place.control().into()]);
        words.extend(["--queues".into(), self.vbd.queues.to_string().into()]);
        words.extend(["--handed".into(), "--confine".into(), "--managed".into()]);
        words.extend(["--when-full".into(), "wait".into()]);
        words.extend(self.threads.iter().cloned());
        if let Some(block) = self.block {
            words.extend(["--logical-block-size".into(), block.to_string().into()]);
        }
        let limits = limits::to_process(self.vbd.limits.as_ref());
        if !limits.is_none() {
            words.extend(["--limit".into(), limits.to_string().into()]);
        }
        if self.tracking.is_some() {
            words.push("--map-of-daemon".into());
        }
        if self.vbd.mode == Mode::ReadOnly {
            words.push("--read-only".into());
        }
        words
    }
}

/// The command-line arguments for threads and CPUs.
fn words_of_threads(plug: &Plug) -> Vec<OsString> {
    let threads = (plug.disk_threads > 1).then(|| plug.disk_threads.to_string());
    let node = plug.disk_numa_node.map(|node| node.to_string());
    let words = [("--threads", threads), ("--cpus", plug.disk_cpus.clone()), ("--numa-node", node)];
    let words = words.into_iter().filter_map(|(word, value)| Some([word.into(), value?.into()]));
    words.flatten().collect()
}

/// The disk's serial number in the guest, independent of its file: as many digits of the VDI's UUID as virtio allows.
pub fn serial(vdi: Uuid) -> String {
    vdi.simple().to_string().chars().take(20).collect()
}

/// The queue's view of an unplug: the process already has its memory.
pub fn to_unplug(vbd: &Vbd) -> Request {
    Request { vbd: vbd.uuid, vm: vbd.vm, mode: vbd.mode, memory: 1 }
}

/// The milliseconds at the end of a name like `disk~250ms`.
fn delay_in(name: &str) -> Duration {
    let milliseconds = name.rsplit_once('~').and_then(|(_, end)| end.strip_suffix("ms")?.parse().ok());
    Duration::from_millis(milliseconds.unwrap_or(0))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_serial_number_is_a_prefix_of_the_vdis_uuid() {
        let vdi = Uuid::parse_str("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d").unwrap();
        assert_eq!(serial(vdi), "9b1deb4d3b7d4bad9bdd");
    }

    #[test]
    fn threads_are_words_only_where_they_are_set() {
        assert_eq!(words_of_threads(&Plug::default()), Vec::<OsString>::new());
        let (disk_cpus, disk_numa_node) = (Some("0-3".into()), Some(1));
        let words = words_of_threads(&Plug { disk_threads: 4, disk_cpus, disk_numa_node, ..Plug::default() });
        assert_eq!(words, ["--threads", "4", "--cpus", "0-3", "--numa-node", "1"]);
    }

    #[test]
    fn an_injected_delay_is_a_suffix_of_the_name() {
        assert_eq!(delay_in("disk~250ms"), Duration::from_millis(250));
        for none in ["disk", "disk~", "disk~ms", "disk~-1ms", "~250ms disk"] {
            assert_eq!(delay_in(none), Duration::ZERO, "{none}");
        }
    }
}

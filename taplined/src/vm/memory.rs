//! The file with the memory of a suspended VM, and the disks that it belongs to.
//!
//! It knows nothing about machines. The file begins with a header: a line of JSON, which is the same record as in the
//! catalogue; then zeros up to [`HEADER`], where QEMU's data begins. Invariants: only root can read a file; one with
//! its final name is complete and durable; memory is loaded only if file and disks match the record.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use api::{Code, Problem};
use control::size::readable;
use repo::catalogue::{DiskOfMemory, ImageOfMemory, VmMemory};
use repo::replace::rename;
use rustix::fs::{Mode, OFlags};
use uuid::Uuid;

use crate::config::Config;
use crate::daemon::Daemon;
use crate::disk::process::DiskProcess;
use crate::task::blocking;

/// Offset of QEMU's data: 255 disks need less than 100 KiB of JSON.
const HEADER: u64 = 256 << 10;

/// Bytes that QEMU needs in addition to the guest's memory: the state of its devices, and a fraction of the memory
/// for page numbers.
const MARGIN: u64 = 64 << 20;
const MARGIN_PART: u64 = 64;

/// Advice if the disks differ from those that the guest knows.
const ADVICE_TO_DISCARD: &str = "put the disk back as it was; or give the memory up (tapline vm drop-memory), after \
                                 which the VM boots as after a power cut";

/// Suffixes of complete and of partial files.
const COMPLETE: &str = "memory";
const PARTIAL: &str = "part";

/// The directory of the files.
pub fn directory(config: &Config) -> PathBuf {
    config.suspended_directory.clone().unwrap_or_else(|| config.state_directory.join("suspended"))
}

/// The complete file of a VM.
pub fn file_of(config: &Config, vm: Uuid) -> PathBuf {
    directory(config).join(format!("{vm}.{COMPLETE}"))
}

/// The file of memory that the catalogue does not know.
fn aside_of(config: &Config, vm: Uuid) -> PathBuf {
    directory(config).join(format!("{vm}.unclaimed"))
}

/// The file of a VM while it is being written.
pub fn partial_of(config: &Config, vm: Uuid) -> PathBuf {
    directory(config).join(format!("{vm}.{PARTIAL}"))
}

/// Creates the directory if it does not exist, and refuses memory for which it lacks space.
pub fn must_have_room(config: &Config, memory: u64) -> Result<(), Problem> {
    let directory = directory(config);
    make(&directory)?;
    let failed = |errno: rustix::io::Errno| {
        Problem::failed(format_args!("query the space in {}", directory.display()), io::Error::from(errno))
    };
    let found = rustix::fs::statvfs(&directory).map_err(failed)?;
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    let needed = memory.saturating_add(memory / MARGIN_PART).saturating_add(HEADER + MARGIN);
    if free >= needed {
        return Ok(());
    }
    let what = format!(
        "the memory needs up to {} in {}, where {} are free",
        readable(needed),
        directory.display(),
        readable(free)
    );
    Err(Problem::new(Code::NoSpace, what).advise("free space there, or set suspended-directory to another file system"))
}

fn make(directory: &Path) -> Result<(), Problem> {
    match DirBuilder::new().mode(0o700).recursive(true).create(directory) {
        Ok(()) => Ok(()),
        Err(error) => Err(Problem::failed(format_args!("create the directory {}", directory.display()), error)),
    }
}

/// Creates a file for this memory, replacing that of an earlier attempt. QEMU writes from its end.
pub fn begin(config: &Config, vm: Uuid, memory: &VmMemory) -> Result<File, Problem> {
    let path = partial_of(config, vm);
    let mut header = serde_json::to_vec(memory).map_err(|error| Problem::failed("describe a VM's memory", error))?;
    header.push(b'\n');
    let create = || {
        remove_if_there(&path)?;
        remove_if_there(&aside_of(config, vm))?;
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(&header)?;
        file.seek(SeekFrom::Start(HEADER))?;
        Ok(file)
    };
    if u64::try_from(header.len()).is_ok_and(|len| len <= HEADER) {
        create().map_err(|error: io::Error| Problem::failed(format_args!("create {}", path.display()), error))
    } else {
        Err(Problem::new(Code::Internal, "the description of a VM's memory is too long"))
    }
}

/// Durably gives a complete file its final name.
pub fn complete(config: &Config, vm: Uuid, file: &File) -> Result<(), Problem> {
    let (from, to) = (partial_of(config, vm), file_of(config, vm));
    let put = || {
        file.sync_all()?;
        rename(&from, &to)
    };
    put().map_err(|error: io::Error| Problem::failed(format_args!("write {}", to.display()), error))
}

/// The record in a complete file.
pub fn describe(config: &Config, vm: Uuid) -> Result<VmMemory, Problem> {
    let path = file_of(config, vm);
    let failed = |error: io::Error| Problem::failed(format_args!("read {}", path.display()), error);
    let file = open_file(&path).map_err(failed)?;
    let memory = header_of(&file).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    Ok(VmMemory { size, ..memory })
}

/// Opens a regular file, without blocking on anything else.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::io::retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file")),
    }
}

fn header_of(file: &File) -> io::Result<VmMemory> {
    let mut bytes = Vec::new();
    let mut reader = file.take(HEADER);
    reader.read_to_end(&mut bytes)?;
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    serde_json::from_slice(line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Opens the file of a record at QEMU's data; a problem tells what is wrong with it.
pub fn open(memory: &VmMemory) -> Result<File, Problem> {
    let wrong = |why: String| {
        let what = format!("the memory file {} {why}", memory.file);
        Err(Problem::new(Code::Failed, what).advise(
            "put the file back as it was, then start the VM; or give its memory up (tapline vm drop-memory), after \
             which it boots as after a power cut",
        ))
    };
    let opened = open_file(Path::new(&memory.file)).and_then(|file| Ok((file.metadata()?, file)));
    let (metadata, mut file) = match opened {
        Ok(found) => found,
        Err(error) => return wrong(format!("cannot be opened: {error}")),
    };
    if metadata.len() != memory.size {
        return wrong(format!("has {} bytes, and had {} when it was written", metadata.len(), memory.size));
    }
    match header_of(&file) {
        Ok(found) if found.id == memory.id => {}
        Ok(_) => return wrong("is that of another time or VM".into()),
        Err(error) => return wrong(format!("does not begin as one of Tapline does: {error}")),
    }
    match file.seek(SeekFrom::Start(HEADER)) {
        Ok(_) => Ok(file),
        Err(error) => wrong(format!("cannot be read: {error}")),
    }
}

/// Removes a file that is no longer needed. If that fails, the next daemon removes it.
pub fn remove(path: &Path) {
    if let Err(error) = remove_if_there(path) {
        tracing::warn!("cannot remove {}, which is not needed any more: {error}", path.display());
    }
}

/// Removes the file of discarded memory.
pub async fn forget_file(file: Option<String>) {
    let Some(file) = file else { return };
    let removed = blocking("remove a VM's memory", move || {
        remove(Path::new(&file));
        Ok(())
    });
    if let Err(problem) = removed.await {
        tracing::warn!("{problem}");
    }
}

/// Removes all files that an attempt to save a VM's memory may have left.
pub fn remove_all(config: &Config, vm: Uuid) -> Result<(), Problem> {
    for path in [partial_of(config, vm), file_of(config, vm)] {
        remove_if_there(&path).map_err(|error| Problem::failed(format_args!("remove {}", path.display()), error))?;
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes files of VMs that run and have no saved memory: a daemon was killed before it removed them. Those of other
/// VMs are renamed: the catalogue may be an older one that was restored, and the memory all that is left. The next
/// suspend of the VM removes them.
pub async fn sweep(daemon: &Daemon) -> Result<(), Problem> {
    let known = daemon.catalogue.read(|view| {
        let saved = |vm: &api::Vm| Ok::<_, Problem>((vm.uuid, view.vm_memory(vm.uuid)?.is_some()));
        let at_work = view.journal()?.into_iter().flat_map(|entry| entry.task.about).map(|about| about.uuid);
        let at_work: Vec<Uuid> = at_work.collect();
        let vms = view.vms()?.iter().map(saved).collect::<Result<Vec<_>, _>>()?;
        Ok(vms.into_iter().filter(|(vm, saved)| !saved && !at_work.contains(vm)).map(|(vm, _)| vm).collect::<Vec<_>>())
    });
    let (known, config) = (known.await?, daemon.config.clone());
    // A running VM has continued: its old memory is of no use.
    let (running, others): (Vec<Uuid>, Vec<Uuid>) = known.into_iter().partition(|vm| daemon.vms.guest(*vm).is_some());
    blocking("remove memory of VMs that were resumed", move || {
        running.iter().flat_map(|vm| [partial_of(&config, *vm), file_of(&config, *vm)]).for_each(|path| remove(&path));
        others.iter().for_each(|vm| put_aside(&config, *vm));
        Ok(())
    })
    .await
}

fn put_aside(config: &Config, vm: Uuid) {
    remove(&partial_of(config, vm));
    let (file, aside) = (file_of(config, vm), aside_of(config, vm));
    match rename(&file, &aside) {
        Ok(()) => tracing::warn!(
            %vm,
            "the memory in {} is not of a suspended VM, as far as the catalogue knows: it was renamed to {}; remove it \
             if the VM has run since",
            file.display(),
            aside.display()
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(%vm, "cannot rename {}: {error}", file.display()),
    }
}

/// The VBDs among these whose first process is still running: no other process can have written to their files since
/// they were opened. Between a dead process and its replacement, another may have.
pub async fn held(daemon: &Daemon, vbds: &[Uuid]) -> Result<HashSet<Uuid>, Problem> {
    let asked = vbds.to_vec();
    let processes = daemon.catalogue.read(move |view| {
        let of_one = |vbd: Uuid| Ok::<_, Problem>((vbd, view.vbd(vbd)?.restarts, view.vbd_process(vbd)?));
        asked.into_iter().map(of_one).collect::<Result<Vec<_>, _>>()
    });
    let mut held = HashSet::new();
    for (vbd, restarts, process) in processes.await? {
        let Some(process) = process.filter(|_| restarts == 0) else { continue };
        if DiskProcess::find(process)?.is_some_and(|process| !process.has_ended()) {
            held.insert(vbd);
        }
    }
    Ok(held)
}

/// The memory of a VM with its disks as they are now that no process has them open; `None` if it has none. The record
/// of a disk is replaced only if its process has `held` it until now: an interrupted start had it open, and others
/// may have written to it since.
pub async fn with_disks(daemon: &Daemon, vm: Uuid, held: &HashSet<Uuid>) -> Result<Option<VmMemory>, Problem> {
    let Some(memory) = daemon.catalogue.read(move |view| view.vm_memory(vm)).await? else { return Ok(None) };
    let mut disks = Vec::new();
    for disk in &memory.disks {
        if !disk.images.is_empty() && !held.contains(&disk.vbd) {
            disks.push(disk.clone());
            continue;
        }
        let images = images_of(daemon, disk.vdi).await.unwrap_or_else(|problem| {
            tracing::warn!(%vm, vdi = %disk.vdi, "its state is not recorded with the VM's memory: {problem}");
            disk.images.clone()
        });
        disks.push(DiskOfMemory { images, ..disk.clone() });
    }
    Ok(Some(VmMemory { disks, ..memory }))
}

/// Refuses memory whose disks were written since: the guest would destroy their contents.
pub async fn must_match(daemon: &Daemon, vm: Uuid, memory: &VmMemory) -> Result<(), Problem> {
    for disk in &memory.disks {
        if disk.images.is_empty() {
            let what = format!(
                "VM {vm} cannot resume from its memory: it is not known how VDI {} was when it was suspended at {:.0}, \
                 since its repository did not answer then",
                disk.vdi, memory.since
            );
            return Err(Problem::new(Code::State, what).advise(ADVICE_TO_DISCARD));
        }
        if images_of(daemon, disk.vdi).await? != disk.images {
            let what = format!(
                "VM {vm} cannot resume from its memory: VDI {} was written to since it was suspended at {:.0}, as \
                 after a backup of the catalogue or of the repository was restored",
                disk.vdi, memory.since
            );
            return Err(Problem::new(Code::State, what).advise(ADVICE_TO_DISCARD));
        }
    }
    Ok(())
}

/// The images of a VDI, and the modification times of their files.
async fn images_of(daemon: &Daemon, vdi: Uuid) -> Result<Vec<ImageOfMemory>, Problem> {
    let mut images = Vec::new();
    for image in daemon.catalogue.read(move |view| view.chain(vdi)).await? {
        let directory = daemon.srs.directory(image.sr).await?;
        let path = directory.path().join(&image.file);
        let found = daemon.srs.patience.ask(image.sr, "examine a file of", move || {
            let failed = |error| Problem::failed(format_args!("examine {}", path.display()), error);
            fs::metadata(&path).map_err(failed)
        });
        let found = found.await?;
        let written = (found.mtime(), found.mtime_nsec());
        images.push(ImageOfMemory { image: image.uuid, size: found.len(), written });
    }
    Ok(images)
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn config(room: &Path) -> Config {
        Config { state_directory: room.to_owned(), ..Config::default() }
    }

    fn memory(config: &Config, vm: Uuid) -> VmMemory {
        VmMemory {
            id: Uuid::new_v4(),
            file: file_of(config, vm).to_string_lossy().into_owned(),
            size: 0,
            since: jiff::Timestamp::UNIX_EPOCH,
            ran: true,
            qemu: "7.2".into(),
            machine: serde_json::Value::Null,
            disks: Vec::new(),
        }
    }

    fn saved(config: &Config, vm: Uuid) -> VmMemory {
        must_have_room(config, 0).unwrap();
        let mut file = begin(config, vm, &memory(config, vm)).unwrap();
        file.write_all(b"QEMU's").unwrap();
        complete(config, vm, &file).unwrap();
        describe(config, vm).unwrap()
    }

    #[test]
    fn a_file_is_private_and_opened_at_qemus_data() {
        let room = tempfile::tempdir().unwrap();
        let (config, vm) = (config(room.path()), Uuid::new_v4());
        let saved = saved(&config, vm);
        assert_eq!((saved.size, fs::metadata(&saved.file).unwrap().mode() & 0o777), (HEADER + 6, 0o600));
        assert_eq!(fs::metadata(directory(&config)).unwrap().mode() & 0o777, 0o700);
        assert!(!partial_of(&config, vm).exists());
        let mut text = String::new();
        open(&saved).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "QEMU's");
    }

    #[test]
    fn a_missing_truncated_or_foreign_file_is_refused_with_the_reason() {
        let room = tempfile::tempdir().unwrap();
        let (config, vm) = (config(room.path()), Uuid::new_v4());
        let known = saved(&config, vm);
        let said = |known: &VmMemory| open(known).err().unwrap().detail;
        let other = saved(&config, vm);
        assert!(said(&known).contains("of another time or VM"));
        let file = OpenOptions::new().write(true).open(&other.file).unwrap();
        file.write_all_at(b"????", 0).unwrap();
        assert!(said(&other).contains("does not begin as one of Tapline does"));
        file.set_len(HEADER + 5).unwrap();
        assert!(said(&other).contains("bytes, and had"));
        remove(Path::new(&other.file));
        assert!(said(&other).contains("cannot be opened"));
    }

    #[test]
    fn memory_is_refused_for_lack_of_space() {
        let room = tempfile::tempdir().unwrap();
        let refused = must_have_room(&config(room.path()), u64::MAX).unwrap_err();
        assert_eq!(refused.code, Code::NoSpace);
        assert!(refused.advice.unwrap().contains("suspended-directory"));
    }
}

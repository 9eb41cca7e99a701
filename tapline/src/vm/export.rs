//! `vm export`: a machine with its disks in one archive.

use api::{
    Boot, Code, ImageFormat, Mode, Power, Problem, Size, Vbd, Vdi, Vm, VmHardware, VmSnapshotCreate, VmSnapshotDisk,
};
use ring::digest::{self, Context};
use tokio::io::AsyncWrite;
use uuid::Uuid;

use super::archive::{self, Disk, Hardware, Machine};
use crate::attach;
use crate::output::say;
use crate::session::{Session, named};
use crate::transfer::{self, Fetched};
use crate::word;

/// Arguments of `vm export`.
#[derive(clap::Args)]
pub struct Export {
    /// Name or UUID prefix
    vm: String,
    /// The archive, which must not exist, where this command runs; '-' is the standard output
    archive: String,
    /// Format of the disks in it
    #[arg(long, default_value = "qcow2", value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: ImageFormat,
}

impl Export {
    /// Writes the archive; a file that is not complete is removed.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Export { vm, archive, format } = self;
        let vm = session.vm(&vm).await?;
        if archive == "-" {
            transfer::must_not_be_terminal(&std::io::stdout())?;
            return export(session, vm, format, &mut tokio::io::stdout()).await;
        }
        let failed = |error| Problem::failed(format_args!("create {archive}"), error);
        let file = std::fs::File::options().write(true).create_new(true).open(&archive).map_err(failed)?;
        let mut file = tokio::fs::File::from_std(file);
        let exported = async {
            export(session, vm, format, &mut file).await?;
            file.sync_all().await.map_err(|error| Problem::failed(format_args!("write {archive}"), error))
        };
        let exported = exported.await;
        if exported.is_err() {
            std::fs::remove_file(&archive).ok();
        }
        exported
    }
}

/// The machine at one moment.
struct Moment {
    hardware: VmHardware,
    disks: Vec<VmSnapshotDisk>,
}

async fn export(
    session: &Session,
    vm: Uuid,
    format: ImageFormat,
    to: &mut (impl AsyncWrite + Unpin),
) -> Result<(), Problem> {
    let known = session.client.vm(vm).await?;
    if known.power == Power::Suspended {
        let what = format!("{} is suspended, and an archive has no memory", named("machine", known.name.as_str(), vm));
        return Err(
            Problem::new(Code::State, what).advise("start it and shut it down first, or export it while it runs")
        );
    }
    let asked = VmSnapshotCreate {
        description: "read by 'vm export', and destroyed after it".parse().unwrap_or_default(),
        ..VmSnapshotCreate::default()
    };
    let taken = match session.client.vm_snapshot(vm, &asked).await {
        Ok(begun) => session.finish(begun).await.and_then(|made| attach::uuid(&made)),
        Err(problem) => Err(problem),
    };
    let taken = match taken {
        // A raw disk on a file system that shares no blocks, or no disk that the guest may write.
        Err(problem) if matches!(problem.code, Code::Unsupported | Code::State) && known.power == Power::Halted => {
            let moment = halted(session, &known, problem).await?;
            return write(session, &known, moment, format, to).await;
        }
        taken => taken?,
    };
    let written = async {
        let all = session.client.vm_snapshots(vm, None).await?;
        let found = all.into_iter().find(|snapshot| snapshot.uuid == taken);
        let found = found.ok_or_else(|| Problem::failed("find the snapshot of the machine", "it is gone"))?;
        write(session, &known, Moment { hardware: found.hardware, disks: found.disks }, format, to).await
    };
    let written = written.await;
    let destroyed = async { session.finish(session.client.vm_snapshot_destroy(vm, taken).await?).await };
    match (written, destroyed.await) {
        (written, Ok(_)) => written,
        (Ok(()), Err(problem)) => Err(still_there(problem, taken)),
        (Err(problem), Err(also)) => Err(problem.advise(format!("the snapshot {taken} is still there: {also}"))),
    }
}

fn still_there(problem: Problem, snapshot: Uuid) -> Problem {
    problem.advise(format!("the archive is complete; destroy the snapshot: tapline vm snapshot-destroy … {snapshot}"))
}

/// The disks of a halted machine that cannot have a snapshot, of which at most one may be written: nothing proves that
/// the machine is not started and shut down between two of them.
async fn halted(session: &Session, known: &Vm, why: Problem) -> Result<Moment, Problem> {
    let mut vbds = session.client.vbds(Some(known.uuid), None, None).await?;
    vbds.sort_by_key(|vbd| vbd.position);
    if vbds.iter().filter(|vbd| vbd.mode == Mode::ReadWrite).count() > 1 {
        return Err(why.advise("export its disks by themselves: tapline vdi export"));
    }
    let disk = |vbd: Vbd| VmSnapshotDisk {
        position: vbd.position,
        mode: vbd.mode,
        bootable: vbd.bootable,
        queues: vbd.queues,
        vdi: vbd.vdi,
        snapshot: None,
    };
    let Vm { driver, memory, vcpus, boot, platform, .. } = known.clone();
    Ok(Moment {
        hardware: VmHardware { driver, memory, vcpus, boot, platform },
        disks: vbds.into_iter().map(disk).collect(),
    })
}

async fn write(
    session: &Session,
    known: &Vm,
    moment: Moment,
    format: ImageFormat,
    to: &mut (impl AsyncWrite + Unpin),
) -> Result<(), Problem> {
    let (disks, vdis): (Vec<Disk>, Vec<Uuid>) = sources(session, moment.disks, format).await?.into_iter().unzip();
    let hardware = hardware(known, moment.hardware)?;
    let described = Machine {
        format: archive::FORMAT.into(),
        version: archive::VERSION,
        name: known.name.clone(),
        description: known.description.clone(),
        hardware,
        disks,
    };
    let text = serde_json::to_string_pretty(&described).map_err(|error| Problem::failed("describe it", error))?;
    let digest = archive::write_text(to, archive::DESCRIPTION, &text).await?;
    let mut digests = format!("{}  {}\n", archive::hex(&digest), archive::DESCRIPTION);
    for (Disk { file: name, .. }, vdi) in described.disks.iter().zip(vdis) {
        let fetched = Fetched::export(session, vdi, format).await?;
        let size = fetched.size();
        archive::write_header(to, name, size).await?;
        let mut digest = Context::new(&digest::SHA256);
        fetched.write_to(session, &format!("writing {name}"), to, |piece| digest.update(piece)).await?;
        archive::pad(to, size).await?;
        digests += &format!("{}  {name}\n", archive::hex(&digest.finish()));
    }
    archive::write_text(to, archive::DIGESTS, &digests).await?;
    archive::finish(to).await
}

/// What the archive has of the hardware; the rest is named on stderr.
fn hardware(known: &Vm, hardware: VmHardware) -> Result<Hardware, Problem> {
    let VmHardware { driver, memory, vcpus, boot, platform } = hardware;
    let (platform, mut left_out) = archive::portable(platform);
    if boot != Boot::default() {
        left_out.push("kernel".into());
    }
    if known.seed {
        left_out.push("cloud-init seed".into());
    }
    if !left_out.is_empty() {
        say(&format!("tapline: not exported, since it belongs to this host: {}\n", left_out.join(", ")));
    }
    let memory = Size::try_from(memory).map_err(|why| Problem::failed("read the memory of the machine", why))?;
    Ok(Hardware { driver, memory, vcpus: u8::try_from(vcpus).unwrap_or(u8::MAX), platform })
}

/// The disks to export, by position, each with the VDI that is exported: its snapshot, if there is one. A medium of a
/// library, or of a repository that is read-only, is not exported.
async fn sources(
    session: &Session,
    disks: Vec<VmSnapshotDisk>,
    format: ImageFormat,
) -> Result<Vec<(Disk, Uuid)>, Problem> {
    let mut sources = Vec::new();
    for disk in disks {
        let Vdi { name, description, logical_block_size, sr, .. } = session.client.vdi(disk.vdi).await?;
        if session.client.sr(sr).await?.is_read_only() {
            say(&format!(
                "tapline: not exported: {}, whose repository is read-only\n",
                named("disk", name.as_str(), disk.vdi)
            ));
            continue;
        }
        let VmSnapshotDisk { position, mode, bootable, queues, .. } = disk;
        let file = format!("disk-{position}.{}", word::of(&format));
        let entry = Disk { file, format, name, description, logical_block_size, position, mode, bootable, queues };
        sources.push((entry, disk.snapshot.unwrap_or(disk.vdi)));
    }
    Ok(sources)
}

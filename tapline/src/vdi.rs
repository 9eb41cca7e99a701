//! `tapline vdi`.

mod make;
mod shown;

use api::{Believed, Description, ImageFormat, Name, Problem, VdiExport, VdiPatch, VdiReconcile, VdiResize, VdiRevert};

use crate::confirm::Confirm;
use crate::session::{Listing, Session, Waiting};
use crate::word::HostPath;
use crate::{removal, word};
use make::{Branch, Copy, Create, Import};
use shown::COLUMNS;

/// What can be done with virtual disks.
#[derive(clap::Subcommand)]
pub enum Verb {
    /// Make an empty disk, and print its UUID
    Create(Create),
    /// List the disks
    List {
        /// Only those of this name, or whose UUID begins so
        text: Option<String>,
        /// Only those of this repository
        #[arg(long)]
        sr: Option<String>,
        #[command(flatten)]
        listing: Listing,
    },
    /// Show a disk
    Show {
        /// Its name or the beginning of its UUID
        vdi: String,
    },
    /// Change a disk's name or description, or whether it may be written
    Set(Set),
    /// Let a disk grow; it may be plugged
    Resize {
        /// Its name or the beginning of its UUID
        vdi: String,
        /// What a guest will see: no less than now
        #[arg(value_parser = word::size)]
        size: api::Size,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Keep a disk's state as another one that is for reading only, and print its UUID; the disk may be plugged
    Snapshot(Branch),
    /// Make a disk that begins with the state of another one, and print its UUID
    Clone(Branch),
    /// Give a disk the state that a snapshot keeps; what was written since is lost
    Revert(Revert),
    /// Copy a disk in full, and print the copy's UUID
    Copy(Copy),
    /// Make a disk of a file of the host, and print its UUID
    Import(Import),
    /// Write a disk, with all that it stands on, into a new file of the host
    Export {
        /// Its name or the beginning of its UUID
        vdi: String,
        /// The file, which must not exist
        #[arg(value_parser = word::path)]
        path: HostPath,
        /// Its format
        #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
        format: ImageFormat,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Make fewer images of those that a disk stands on; it may be plugged
    Merge {
        /// Its name or the beginning of its UUID
        vdi: String,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Decide what a disk consists of that is diverged: its running process and the catalogue do not say the same
    Reconcile(Reconcile),
    /// Destroy a disk; what others share with it stays
    Destroy(Destroy),
}

/// Changes a disk.
#[derive(clap::Args)]
#[command(group = word::changes(&["name", "description", "read_only"]))]
#[group(skip)]
pub struct Set {
    /// Its name or the beginning of its UUID
    vdi: String,
    /// Its new name
    #[arg(long)]
    name: Option<Name>,
    /// Its new description
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    /// Whether it may only be read; not while it is plugged
    #[arg(long, value_name = "BOOL")]
    read_only: Option<bool>,
}

/// Reverts a disk.
#[derive(clap::Args)]
pub struct Revert {
    /// Its name or the beginning of its UUID
    vdi: String,
    /// The snapshot's name or the beginning of its UUID
    #[arg(long)]
    to: String,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

/// Decides what a disk consists of.
#[derive(clap::Args)]
pub struct Reconcile {
    /// Its name or the beginning of its UUID
    vdi: String,
    /// Who is right: the running disk, or the catalogue, from which it is served when it is plugged again
    #[arg(long, value_parser = word::one_of::<Believed>(&["disk", "catalogue"]))]
    believe: Believed,
    #[command(flatten)]
    confirm: Confirm,
}

/// Destroys a disk.
#[derive(clap::Args)]
pub struct Destroy {
    /// Its name or the beginning of its UUID
    vdi: String,
    /// Only tell what would be destroyed
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

impl Verb {
    /// Does it.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        match self {
            Verb::Create(create) => create.run(session).await,
            Verb::List { text, sr, listing } => list(session, text.as_deref(), sr.as_deref(), &listing).await,
            Verb::Show { vdi } => session.show(&client.vdi(session.vdi(&vdi).await?).await?, COLUMNS),
            Verb::Set(Set { vdi, name, description, read_only }) => {
                let patch = VdiPatch { name, description, read_only };
                let vdi = client.vdi_set(session.vdi(&vdi).await?, &patch).await?;
                if session.json() { session.value(&vdi) } else { Ok(()) }
            }
            Verb::Resize { vdi, size, waiting } => {
                let vdi = session.vdi(&vdi).await?;
                session.did(client.vdi_resize(vdi, &VdiResize { size }).await?, waiting).await
            }
            Verb::Snapshot(branch) => branch.snapshot(session).await,
            Verb::Clone(branch) => branch.clone(session).await,
            Verb::Revert(revert) => revert.run(session).await,
            Verb::Copy(copy) => copy.run(session).await,
            Verb::Import(import) => import.run(session).await,
            Verb::Export { vdi, path, format, waiting } => {
                let (vdi, path) = (session.vdi(&vdi).await?, session.path(path)?);
                session.did(client.vdi_export(vdi, &VdiExport { path, format }).await?, waiting).await
            }
            Verb::Merge { vdi, waiting } => {
                session.did(client.vdi_merge(session.vdi(&vdi).await?).await?, waiting).await
            }
            Verb::Reconcile(reconcile) => reconcile.run(session).await,
            Verb::Destroy(destroy) => destroy.run(session).await,
        }
    }
}

async fn list(session: &Session, text: Option<&str>, sr: Option<&str>, listing: &Listing) -> Result<(), Problem> {
    let sr = match sr {
        Some(sr) => Some(session.sr(sr).await?),
        None => None,
    };
    session.list(&session.client.vdis(sr, text).await?, COLUMNS, listing)
}

impl Revert {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = session.client.vdi(session.vdi(&self.vdi).await?).await?;
        let snapshot = session.client.vdi(session.vdi(&self.to).await?).await?;
        self.confirm.ask(&format!(
            "give the vdi «{}» ({}) the state of «{}» ({}); what was written since is lost",
            vdi.name, vdi.uuid, snapshot.name, snapshot.uuid
        ))?;
        let asked = VdiRevert { snapshot: snapshot.uuid };
        session.did(session.client.vdi_revert(vdi.uuid, &asked).await?, self.waiting).await
    }
}

impl Reconcile {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = session.client.vdi(session.vdi(&self.vdi).await?).await?;
        let lost = match self.believe {
            Believed::Disk => "vdis that stood on files which it has no more count as damaged then",
            Believed::Catalogue => "what was written to other files is not in it then",
        };
        self.confirm.ask(&format!(
            "believe {} of the vdi «{}» ({}): {lost}",
            word::of(&self.believe),
            vdi.name,
            vdi.uuid
        ))?;
        let vdi = session.client.vdi_reconcile(vdi.uuid, &VdiReconcile { believe: self.believe }).await?;
        if session.json() { session.value(&vdi) } else { Ok(()) }
    }
}

impl Destroy {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = session.client.vdi(session.vdi(&self.vdi).await?).await?;
        if self.dry_run {
            return removal::told(session, session.client.vdi_destroy(vdi.uuid, true).await?, self.waiting).await;
        }
        self.confirm.ask(&format!("destroy the vdi «{}» ({})", vdi.name, vdi.uuid))?;
        session.did(session.client.vdi_destroy(vdi.uuid, false).await?, self.waiting).await
    }
}

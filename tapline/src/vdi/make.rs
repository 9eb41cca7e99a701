//! The verbs that make a disk. Each prints the UUID of what it has made.

use api::{Description, ImageFormat, Name, Problem, Size, VdiClone, VdiCopy, VdiCreate, VdiImport, VdiSnapshot};

use crate::session::{Session, Waiting};
use crate::word::{self, HostPath};

/// Makes an empty disk.
#[derive(clap::Args)]
pub struct Create {
    /// Its name
    name: Name,
    /// The repository: its name or the beginning of its UUID
    #[arg(long)]
    sr: String,
    /// What a guest will see
    #[arg(long, value_parser = word::size)]
    size: Size,
    /// The format [default: the repository's choice]
    #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    /// Its description
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    #[command(flatten)]
    waiting: Waiting,
}

/// Makes a disk of the state of another one.
#[derive(clap::Args)]
pub struct Branch {
    /// Its name or the beginning of its UUID
    vdi: String,
    /// The name of the new one [default: the same]
    #[arg(long)]
    name: Option<Name>,
    /// The description of the new one
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    #[command(flatten)]
    waiting: Waiting,
}

/// Copies a disk.
#[derive(clap::Args)]
pub struct Copy {
    /// Its name or the beginning of its UUID
    vdi: String,
    /// The repository of the copy: its name or the beginning of its UUID
    #[arg(long)]
    sr: String,
    /// The copy's name [default: the same]
    #[arg(long)]
    name: Option<Name>,
    /// The copy's format [default: the repository's choice]
    #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    waiting: Waiting,
}

/// Makes a disk of a file.
#[derive(clap::Args)]
pub struct Import {
    /// Its name
    name: Name,
    /// The file, which stands on no other
    #[arg(value_parser = word::path)]
    path: HostPath,
    /// The repository: its name or the beginning of its UUID
    #[arg(long)]
    sr: String,
    /// What the file is; it is never guessed
    #[arg(long, value_name = "FORMAT", value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    source_format: ImageFormat,
    /// The format of the disk [default: the repository's choice]
    #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    /// Its description
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    #[command(flatten)]
    waiting: Waiting,
}

impl Create {
    /// Does it.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Create { name, sr, size, format, description, waiting } = self;
        let asked = VdiCreate { sr: session.sr(&sr).await?, name, description, size, format };
        session.made(session.client.vdi_create(&asked).await?, waiting).await
    }
}

impl Branch {
    /// Makes one for reading only.
    pub async fn snapshot(self, session: &Session) -> Result<(), Problem> {
        let Branch { vdi, name, description, waiting } = self;
        let vdi = session.vdi(&vdi).await?;
        session.made(session.client.vdi_snapshot(vdi, &VdiSnapshot { name, description }).await?, waiting).await
    }

    /// Makes one to be written.
    pub async fn clone(self, session: &Session) -> Result<(), Problem> {
        let Branch { vdi, name, description, waiting } = self;
        let vdi = session.vdi(&vdi).await?;
        session.made(session.client.vdi_clone(vdi, &VdiClone { name, description }).await?, waiting).await
    }
}

impl Copy {
    /// Does it.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Copy { vdi, sr, name, format, waiting } = self;
        let vdi = session.vdi(&vdi).await?;
        let asked = VdiCopy { sr: session.sr(&sr).await?, name, format };
        session.made(session.client.vdi_copy(vdi, &asked).await?, waiting).await
    }
}

impl Import {
    /// Does it.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Import { name, path, sr, source_format, format, description, waiting } = self;
        let path = session.path(path)?;
        let asked = VdiImport { sr: session.sr(&sr).await?, name, description, path, source_format, format };
        session.made(session.client.vdi_import(&asked).await?, waiting).await
    }
}

//! The verbs that create a disk and print its UUID.

use api::{
    Description, ImageFormat, LogicalBlockSize, Name, Problem, Size, SourceFormat, VdiClone, VdiCopy, VdiCreate,
    VdiImport, VdiSnapshot,
};

use super::source_format;
use crate::find::Disk;
use crate::image_source::{ImageSource, Verified};
use crate::label::NewLabels;
use crate::session::{Session, Waiting};
use crate::transfer::{self, Reader};
use crate::word;

/// Arguments of `vdi create`.
#[derive(clap::Args)]
pub struct Create {
    /// Name of the disk
    name: Name,
    /// Size seen by the guest
    #[arg(value_parser = word::size, required_unless_present = "size_option", conflicts_with = "size_option")]
    size: Option<Size>,
    /// The size, as an option
    #[arg(long = "size", value_name = "SIZE", allow_hyphen_values = true, value_parser = word::size)]
    size_option: Option<Size>,
    /// The repository: its name or UUID prefix [default: the only attached one, ISO libraries aside]
    #[arg(long)]
    sr: Option<String>,
    /// Size of the sectors that the guest addresses, in bytes [default: 512]
    #[arg(long, value_name = "BYTES", value_parser = word::block_size())]
    logical_block_size: Option<LogicalBlockSize>,
    /// Format [default: the repository's default]
    #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    /// Make it even if another disk in the repository has this name
    #[arg(long)]
    allow_duplicate_name: bool,
    /// Description
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    #[command(flatten)]
    labels: NewLabels,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vdi snapshot` and `vdi clone`.
#[derive(clap::Args)]
pub struct Branch {
    #[command(flatten)]
    vdi: Disk,
    /// Name of the new disk [default: a snapshot's is NAME@TIME in UTC, a clone's NAME-clone]
    #[arg(long)]
    name: Option<Name>,
    /// Description of the new disk
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    #[command(flatten)]
    labels: NewLabels,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vdi copy`.
#[derive(clap::Args)]
pub struct Copy {
    /// Name or UUID prefix
    vdi: String,
    /// Repository of the copy: its name or UUID prefix [default: the disk's own]
    #[arg(long)]
    sr: Option<String>,
    /// Name of the copy [default: the same name, or NAME-copy if that is taken]
    #[arg(long)]
    name: Option<Name>,
    /// Format of the copy [default: the repository's default]
    #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    labels: NewLabels,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vdi import`.
#[derive(clap::Args)]
pub struct Import {
    /// Name of the disk
    name: Name,
    /// The file, which must not have a backing file: a path on the daemon's host, or https://HOST/PATH; '-' reads the
    /// standard input, and takes space in the repository until the disk is complete
    #[arg(value_name = "PATH|URL|-", value_parser = ImageSource::parse)]
    path: ImageSource,
    /// The repository: its name or UUID prefix [default: the only attached one, ISO libraries aside]
    #[arg(long)]
    sr: Option<String>,
    /// Format of the file; it is never guessed [default for a URL: its ending]
    #[arg(long, value_name = "FORMAT", value_parser = word::one_of::<SourceFormat>(&word::SOURCE_FORMATS))]
    source_format: Option<SourceFormat>,
    #[command(flatten)]
    verified: Verified,
    /// Take a raw file for what it is called, even if it looks like an image of another format
    #[arg(long)]
    really_raw: bool,
    /// Size of the sectors that the guest addresses, in bytes [default: that of a VHDX, otherwise 512]
    #[arg(long, value_name = "BYTES", value_parser = word::block_size())]
    logical_block_size: Option<LogicalBlockSize>,
    /// Format of the disk [default: the repository's default]
    #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    /// Make it even if another disk in the repository has this name
    #[arg(long)]
    allow_duplicate_name: bool,
    /// Description
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    #[command(flatten)]
    labels: NewLabels,
    #[command(flatten)]
    waiting: Waiting,
}

impl Create {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Create {
            name,
            sr,
            size,
            size_option,
            logical_block_size,
            format,
            allow_duplicate_name,
            description,
            labels,
            waiting,
        } = self;
        let (tags, other_config) = labels.values()?;
        let sr = session.sr_or_only(sr.as_deref()).await?;
        let request = VdiCreate {
            uuid: None,
            sr,
            name,
            allow_duplicate_name,
            description,
            size: size.or(size_option).unwrap_or_else(|| unreachable!("one of them is required")),
            logical_block_size,
            format,
            tags,
            other_config,
        };
        session.print_created(session.client.vdi_create(&request).await?, waiting).await
    }
}

impl Branch {
    /// Takes a read-only snapshot.
    pub async fn snapshot(self, session: &Session) -> Result<(), Problem> {
        let Branch { vdi, name, description, labels, waiting } = self;
        let (tags, other_config) = labels.values()?;
        let vdi = vdi.find(session).await?;
        let request = VdiSnapshot { uuid: None, name, description, tags, other_config };
        session.print_created(session.client.vdi_snapshot(vdi, &request).await?, waiting).await
    }

    /// Creates a writable clone.
    pub async fn clone(self, session: &Session) -> Result<(), Problem> {
        let Branch { vdi, name, description, labels, waiting } = self;
        let (tags, other_config) = labels.values()?;
        let vdi = vdi.find(session).await?;
        let request = VdiClone { uuid: None, name, description, tags, other_config };
        session.print_created(session.client.vdi_clone(vdi, &request).await?, waiting).await
    }
}

impl Copy {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Copy { vdi, sr, name, format, labels, waiting } = self;
        let (tags, other_config) = labels.values()?;
        let vdi = session.vdi(&vdi).await?;
        let sr = match sr {
            Some(sr) => session.sr(&sr).await?,
            None => session.client.vdi(vdi).await?.sr,
        };
        let request = VdiCopy { uuid: None, sr, name, format, tags, other_config };
        session.print_created(session.client.vdi_copy(vdi, &request).await?, waiting).await
    }
}

impl Import {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Import {
            name,
            path: source,
            sr,
            source_format,
            verified,
            really_raw,
            logical_block_size,
            format,
            allow_duplicate_name,
            description,
            labels,
            waiting,
        } = self;
        let (tags, other_config) = labels.values()?;
        let source_format = source_format::required(source_format, name.as_str(), &source)?;
        source.check(&verified)?;
        let sr = session.sr_or_only(sr.as_deref()).await?;
        let upload = match source {
            ImageSource::Standard => {
                waiting.must_wait("an import from the standard input")?;
                let mut input = Reader::of_standard_input();
                Some(transfer::upload(session, sr, name.clone(), None, &mut input).await?)
            }
            ImageSource::File(_) | ImageSource::Url(_) => None,
        };
        let (path, url) = source.of_request(session)?;
        let Verified { checksum, insecure_http } = verified;
        let request = VdiImport {
            uuid: None,
            sr,
            name,
            allow_duplicate_name,
            description,
            path,
            upload,
            url,
            checksum,
            insecure_http,
            source_format,
            really_raw,
            logical_block_size,
            format,
            tags,
            other_config,
        };
        let imported = async { session.print_created(session.client.vdi_import(&request).await?, waiting).await };
        match upload {
            Some(upload) => transfer::or_remove(session, upload, imported).await,
            None => imported.await,
        }
    }
}

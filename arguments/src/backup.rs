//! The words of `tapline backup`, for the program `tapline-backup`, which carries them out.

use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use control::size::Size;

use crate::{example, mistyped, number};

/// Examples of all commands of `tapline-backup`.
pub const EXAMPLES: &str = include_str!("backup_examples.txt");

/// Tapline's backup program: keeps disks on a backup target, and brings them back. It needs no daemon; disks of the
/// daemon are backed up and restored with `tapline vdi backup` and `tapline vdi restore`.
///
/// A TARGET is a directory, such as a mount of NFS or SMB, or s3://BUCKET[/PREFIX], whose server and credentials are in
/// options, or in AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. A disk is the URI of an
/// NBD export (nbd+unix:///EXPORT?socket=PATH, nbd://HOST[:PORT]/EXPORT), or an image that no virtual machine uses
/// (FORMAT:PATH). A backup is named by its ID, or the first 8 or more digits of it. Exit codes: 0 success, 2 the target
/// is damaged, 4 the command failed, 6 no such target or backup, 7 it exists already or is in use, 9 no space, 64
/// invalid arguments.
#[derive(Debug, Parser)]
#[command(name = "tapline-backup", version, arg_required_else_help = true, propagate_version = true)]
pub struct BackupArguments {
    /// The noun.
    #[command(subcommand)]
    pub noun: BackupNoun,
}

impl BackupArguments {
    /// The command line of this process.
    pub fn of_process() -> Result<BackupArguments, clap::Error> {
        let command = example::teach(BackupArguments::command(), &example::examples(EXAMPLES));
        let parsed = command.clone().try_get_matches().and_then(|found| BackupArguments::from_arg_matches(&found));
        parsed.map_err(|refused| mistyped::with_tips(refused, &command))
    }
}

/// The noun of `tapline-backup`.
#[derive(Debug, Subcommand)]
pub enum BackupNoun {
    /// Back up disks to a target, list, verify, restore and serve backups
    #[command(subcommand)]
    Backup(Backup),
}

/// The verbs of `tapline backup`.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one in a process")]
pub enum Backup {
    /// Create backup targets and show them
    #[command(subcommand)]
    Target(BackupTarget),
    /// Back up a disk
    Create(BackupCreate),
    /// List the backups on a target, the oldest first
    List(BackupList),
    /// Show a backup: its disk, its time, and what it cost
    Show(BackupOne),
    /// Restore a backup to a new image, or to an NBD export
    Restore(BackupRestore),
    /// Read everything on a target, and list damage and the backups that it costs
    Verify(BackupVerify),
    /// Remove backups, and free the space that no other backup needs
    Remove(BackupRemove),
    /// Remove the backups that are superfluous by a rule, and free space
    Prune(BackupPrune),
    /// Serve a backup as a read-only NBD export, until interrupted
    Mount(BackupMount),
}

/// The verbs of `tapline backup target`.
#[derive(Debug, Subcommand)]
pub enum BackupTarget {
    /// Make an empty directory, or an unused prefix of a bucket, a backup target
    Create(TargetCreate),
    /// Show a target: its ID, layout and encryption, and what is on it
    Show(TargetShow),
}

/// A target, and how it is opened.
#[derive(Clone, Debug, Args)]
pub struct At {
    /// The backup target: a directory, or s3://BUCKET[/PREFIX]
    #[arg(value_name = "TARGET")]
    pub target: PathBuf,
    /// The key file that the target was created with, if it is encrypted
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Fail unless it is the target with this ID: where its mount is missing there may be another one
    #[arg(long, value_name = "ID")]
    pub target_id: Option<String>,
    /// How a bucket is reached.
    #[command(flatten)]
    pub s3: S3Access,
    /// Print JSON; progress is printed as lines of JSON on standard error
    #[arg(long)]
    pub json: bool,
    /// Exit as if killed when the other end of standard input is closed
    #[arg(long, hide = true)]
    pub end_with_input: bool,
}

/// The server of a target in S3, and the key for it. Each of these options takes the place of variables of the
/// environment.
#[derive(Clone, Debug, Default, Args)]
pub struct S3Access {
    /// Of a target in S3: the file with the key, as Amazon's tools keep it (aws_access_key_id and aws_secret_access_key
    /// of the profile 'default'); only its owner may have access
    #[arg(long, value_name = "FILE")]
    pub credentials: Option<PathBuf>,
    /// Of a target in S3: its server, for all but Amazon's; TLS is used unless it begins with http://
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// Of a target in S3: the region
    #[arg(long, value_name = "NAME")]
    pub region: Option<String>,
    /// Of a target in S3: certificates of the authorities that are trusted (PEM), instead of those of the system
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
}

impl S3Access {
    /// The first of these options that was given, for what is not in S3.
    pub fn given(&self) -> Option<&'static str> {
        let S3Access { credentials, endpoint, region, ca_file } = self;
        let all = [
            ("--credentials", credentials.is_some()),
            ("--endpoint", endpoint.is_some()),
            ("--region", region.is_some()),
            ("--ca-file", ca_file.is_some()),
        ];
        all.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
    }
}

/// Arguments of `backup target create`.
#[derive(Debug, Args)]
pub struct TargetCreate {
    /// The target; a key file makes it an encrypted one.
    #[command(flatten)]
    pub at: At,
    /// Encrypt with a new key, and write it to this file, which must not exist. Keep a copy elsewhere: without it
    /// nothing can be restored
    #[arg(long, value_name = "FILE", conflicts_with = "key_file")]
    pub new_key: Option<PathBuf>,
    /// The unit in which equal data is stored once: a power of two, 4K to 4M
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    pub chunk_size: Size,
    /// Level of compression by zstd, 1 to 19; 0: none
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number::<u8>(0..=19))]
    pub compression: u8,
}

/// Arguments of `backup target show`.
#[derive(Debug, Args)]
pub struct TargetShow {
    /// The target.
    #[command(flatten)]
    pub at: At,
}

/// Arguments of `backup create`.
#[derive(Debug, Args)]
pub struct BackupCreate {
    /// Where to.
    #[command(flatten)]
    pub at: At,
    /// The disk: the URI of an NBD export, or FORMAT:PATH
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// The name of the disk on the target, the same for each of its backups and for no other disk, on no other host:
    /// rules of retention count by it
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// What identifies the disk on the target in place of its name, which may then be any that people know it by
    #[arg(long, value_name = "TEXT")]
    pub disk: Option<String>,
    /// The moment of the content (RFC 3339), if that is not now
    #[arg(long, value_name = "TIME")]
    pub time: Option<String>,
    /// What identifies the machine, if this is one of the backups of all of its disks at one moment: rules of retention
    /// count them as one
    #[arg(long, value_name = "TEXT", requires = "moment")]
    pub machine: Option<String>,
    /// What identifies that moment, such as a random UUID: the same with each of the disks, and never again
    #[arg(long, value_name = "TEXT", requires = "disks")]
    pub moment: Option<String>,
    /// The number of disks of the machine
    #[arg(long, value_name = "N", requires = "machine", value_parser = number::<u32>(1..=65_535))]
    pub disks: Option<u32>,
    /// Keep the JSON in the variable TAPLINE_PROPERTIES with the backup; `show --json` prints it. Not an argument,
    /// because every user of a host can read those
    #[arg(long, hide = true)]
    pub properties: bool,
    /// Read only what has changed since this backup of the same disk; needs --changed or --bitmap
    #[arg(long, value_name = "ID")]
    pub since: Option<String>,
    /// The content digest of that backup, as recorded when the changes began to be recorded; another base is refused
    #[arg(long, value_name = "DIGEST", requires = "since")]
    pub since_content: Option<String>,
    /// What may have changed: a file with JSON as [{"start":0,"length":65536}], or - for standard input
    #[arg(long, value_name = "FILE", requires = "since", conflicts_with = "bitmap")]
    pub changed: Option<PathBuf>,
    /// Get what may have changed from the NBD server, which offers it as qemu:dirty-bitmap:NAME
    #[arg(long, value_name = "NAME", requires = "since")]
    pub bitmap: Option<String>,
    /// First verify the target, then send again what is damaged there: other backups of the same data are whole again
    #[arg(long, conflicts_with = "since")]
    pub repair: bool,
    /// Parents of an image that is given as FORMAT:PATH.
    #[command(flatten)]
    pub parents: BackupParents,
    /// How much of the processor is used.
    #[command(flatten)]
    pub threads: Threads,
}

/// Parents of the image.
#[derive(Clone, Debug, Args)]
pub struct BackupParents {
    /// The parent of the image SOURCE; repeat for the parent's parent and so on, from the top down
    #[arg(long = "parent", value_name = "FORMAT:PATH")]
    pub names: Vec<String>,
}

/// Number of threads.
#[derive(Clone, Copy, Debug, Args)]
pub struct Threads {
    /// Threads for compression, encryption and digests [default: one for each processor, up to 8]
    #[arg(long, value_name = "N", value_parser = number::<u16>(1..=64))]
    pub threads: Option<u16>,
}

/// Arguments of `backup list`.
#[derive(Debug, Args)]
pub struct BackupList {
    /// Which target.
    #[command(flatten)]
    pub at: At,
    /// Only backups of the disk of this name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Only backups of the disk that was identified by this text
    #[arg(long, value_name = "TEXT")]
    pub disk: Option<String>,
}

/// Arguments of `backup show`.
#[derive(Debug, Args)]
pub struct BackupOne {
    /// Which target.
    #[command(flatten)]
    pub at: At,
    /// The backup
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Arguments of `backup restore`.
#[derive(Debug, Args)]
pub struct BackupRestore {
    /// Which target.
    #[command(flatten)]
    pub at: At,
    /// The backup
    #[arg(value_name = "ID")]
    pub id: String,
    /// Where to: a new image (FORMAT:PATH), or the URI of an NBD export, which must be blank and large enough
    #[arg(value_name = "DESTINATION")]
    pub destination: String,
    /// Overwrite an NBD export that is not blank, all of it
    #[arg(long)]
    pub force: bool,
    /// How much of the processor is used.
    #[command(flatten)]
    pub threads: Threads,
}

/// Arguments of `backup verify`.
#[derive(Debug, Args)]
pub struct BackupVerify {
    /// Which target.
    #[command(flatten)]
    pub at: At,
    /// How much of the processor is used.
    #[command(flatten)]
    pub threads: Threads,
}

/// Arguments of `backup remove`.
#[derive(Debug, Args)]
pub struct BackupRemove {
    /// Which target.
    #[command(flatten)]
    pub at: At,
    /// The backups
    #[arg(value_name = "ID", required = true)]
    pub ids: Vec<String>,
    /// When leftovers are deleted.
    #[command(flatten)]
    pub grace: Grace,
}

/// How long objects are spared.
#[derive(Clone, Copy, Debug, Args)]
pub struct Grace {
    /// Spare what no backup refers to for this time: it may be of a backup that is running on any host. Use more than
    /// the longest backup takes; one that takes longer sends some data twice
    #[arg(long, value_name = "HOURS", default_value_t = 24, value_parser = number::<u32>(0..=87_600))]
    pub grace: u32,
}

/// Arguments of `backup prune`.
#[derive(Debug, Args)]
pub struct BackupPrune {
    /// Which target.
    #[command(flatten)]
    pub at: At,
    /// Only backups of the disk of this name [default: those of each disk and machine, by themselves]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Only backups of the disk that was identified by this text
    #[arg(long, value_name = "TEXT", conflicts_with = "name")]
    pub disk: Option<String>,
    /// Only backups of the machine that was identified by this text: all of its disks are retained or removed together
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["name", "disk"])]
    pub machine: Option<String>,
    /// Which are retained.
    #[command(flatten)]
    pub keep: Keep,
    /// Only list the backups that would be removed
    #[arg(long)]
    pub dry_run: bool,
    /// The time now (RFC 3339), by the clock of a daemon that has decided by it that the backups are pruned
    #[arg(long, value_name = "TIME", hide = true)]
    pub now: Option<String>,
    /// When leftovers are deleted.
    #[command(flatten)]
    pub grace: Grace,
}

/// Which backups of a disk or machine are retained. None of these options: all; only leftovers are deleted.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Keep {
    /// Retain the last N backups
    #[arg(long = "keep-last", value_name = "N")]
    pub last: Option<u16>,
    /// Retain the last backup of each of N hours
    #[arg(long = "keep-hourly", value_name = "N")]
    pub hourly: Option<u16>,
    /// Retain the last backup of each of N days
    #[arg(long = "keep-daily", value_name = "N")]
    pub daily: Option<u16>,
    /// Retain the last backup of each of N weeks
    #[arg(long = "keep-weekly", value_name = "N")]
    pub weekly: Option<u16>,
    /// Retain the last backup of each of N months
    #[arg(long = "keep-monthly", value_name = "N")]
    pub monthly: Option<u16>,
}

/// Arguments of `backup mount`.
#[derive(Debug, Args)]
pub struct BackupMount {
    /// Which target.
    #[command(flatten)]
    pub at: At,
    /// The backup
    #[arg(value_name = "ID")]
    pub id: String,
    /// Serve NBD here: a socket path, or an address and port of this host. TCP is neither encrypted nor authenticated:
    /// everyone who reaches the port can read the backup
    #[arg(long, value_name = "SOCKET|ADDRESS:PORT")]
    pub nbd: String,
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_command_definition_is_consistent() {
        BackupArguments::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples_that_it_understands() {
        let faults = example::faults(&BackupArguments::command(), EXAMPLES);
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn changes_need_a_base_and_come_from_one_place() {
        let parse = |words: &str| {
            BackupArguments::try_parse_from(
                format!("t backup create /t nbd://h --name a {words}").split(' ').filter(|word| !word.is_empty()),
            )
        };
        assert!(parse("").is_ok());
        assert!(parse("--changed f").is_err());
        assert!(parse("--since 00 --changed f").is_ok());
        assert!(parse("--since 00 --changed f --bitmap b").is_err());
    }
}

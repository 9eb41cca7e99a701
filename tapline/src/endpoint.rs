//! Where the daemon is: at a Unix socket on this host, or at a network address with a token. Options take precedence
//! over environment variables.
//!
//! A token is never a command-line argument, because every user of a host can read those.

use std::env;
use std::path::{Path, PathBuf};

use api::client::{Client, Remote, SOCKET};
use api::{Code, Problem, Secret};

/// The environment variable that contains a token.
const TOKEN: &str = "TAPLINE_TOKEN";

/// Options that select the daemon.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct EndpointOptions {
    /// The daemon's socket; also TAPLINE_SOCKET [default: /run/tapline/taplined.sock]
    #[arg(long, global = true, help_heading = "The daemon", value_name = "PATH",
        conflicts_with_all = ["connect", "ca", "token_file"])]
    socket: Option<PathBuf>,
    /// Connect to a daemon at https://HOST:PORT instead of a socket; also TAPLINE_CONNECT
    #[arg(long, global = true, help_heading = "The daemon", value_name = "URL")]
    connect: Option<String>,
    /// With --connect: a PEM file with the CA certificate for the daemon; also TAPLINE_CA [default: the host's trusted
    /// CAs]
    #[arg(long, global = true, help_heading = "The daemon", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// With --connect: a file that contains the token [default: the token in TAPLINE_TOKEN]
    #[arg(long, global = true, help_heading = "The daemon", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl EndpointOptions {
    /// Whether any of these options is given on the command line.
    pub fn is_given(&self) -> bool {
        let EndpointOptions { socket, connect, ca, token_file } = self;
        socket.is_some() || connect.is_some() || ca.is_some() || token_file.is_some()
    }

    /// Whether an option for a daemon on another host is given on the command line.
    pub fn is_network_given(&self) -> bool {
        self.connect.is_some() || self.ca.is_some() || self.token_file.is_some()
    }

    /// The run directory of the daemon on this host, which contains its socket.
    pub fn run_directory(&self) -> Result<PathBuf, Problem> {
        if self.is_network_given() {
            let what = "--connect, --ca and --token-file do not apply: this command needs the daemon of this host";
            return Err(Problem::new(Code::Invalid, what).advise("leave them out"));
        }
        let socket = self.socket.clone().or_else(|| env::var_os("TAPLINE_SOCKET").map(PathBuf::from));
        let socket = socket.filter(|socket| !socket.as_os_str().is_empty()).unwrap_or_else(|| SOCKET.into());
        socket.parent().map(Path::to_owned).ok_or_else(|| Problem::new(Code::Invalid, "the socket has no directory"))
    }

    /// Returns a client of the daemon, and whether it is reached over the network.
    pub fn client(self) -> Result<(Client, bool), Problem> {
        let EndpointOptions { socket, connect, ca, token_file } = self;
        let named = socket.is_some() || connect.is_some();
        let from_environment = |name| env::var_os(name).filter(|value| !named && !value.is_empty());
        let socket = socket.or(from_environment("TAPLINE_SOCKET").map(PathBuf::from));
        let connect = match from_environment("TAPLINE_CONNECT").map(|url| url.into_string()) {
            Some(Ok(url)) => Some(url),
            Some(Err(_)) => return Err(Problem::new(Code::Invalid, "TAPLINE_CONNECT is not UTF-8")),
            None => connect,
        };
        match (socket, connect) {
            (Some(_), Some(_)) => {
                let what = "both TAPLINE_SOCKET and TAPLINE_CONNECT are set";
                Err(Problem::new(Code::Invalid, what).advise("unset one of them, or use --socket or --connect"))
            }
            (_, Some(url)) => {
                let ca = ca.or(env::var_os("TAPLINE_CA").filter(|ca| !ca.is_empty()).map(PathBuf::from));
                Ok((Client::remote(Remote::new(&url, ca.as_deref(), &secret(token_file)?)?), true))
            }
            (_, None) if ca.is_some() || token_file.is_some() => {
                let what = "--ca and --token-file only apply to a daemon given by its address";
                Err(Problem::new(Code::Invalid, what).advise("give the address with --connect https://HOST:PORT"))
            }
            (socket, None) => Ok((Client::new(socket.unwrap_or_else(|| SOCKET.into())), false)),
        }
    }
}

/// Reads the token from the file, or else from the environment.
fn secret(file: Option<PathBuf>) -> Result<Secret, Problem> {
    let (text, from) = match file {
        Some(file) => {
            let tried = format!("read the token {}", file.display());
            let text = std::fs::read_to_string(&file).map_err(|error| Problem::failed(tried, error))?;
            (text, file.display().to_string())
        }
        None => match env::var(TOKEN) {
            Ok(text) if !text.trim().is_empty() => (text, TOKEN.to_owned()),
            _ => {
                let what = "a daemon reached over the network requires a token; none is configured";
                let advice = format!(
                    "give its file with --token-file FILE or set {TOKEN}; root creates a token on the daemon's host \
                     with 'tapline token create NAME'"
                );
                return Err(Problem::new(Code::Unauthorized, what).advise(advice));
            }
        },
    };
    text.trim().parse().map_err(|why| Problem::new(Code::Invalid, format!("{from} holds no token: {why}")))
}

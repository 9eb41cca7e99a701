//! Where the daemon is that a command asks: a socket of this host, or an address with a token. What options say goes before what
//! the environment does.
//!
//! A token is never among the words of a command: everybody on a host can read those.

use std::env;
use std::path::PathBuf;

use api::client::{Client, Remote, SOCKET};
use api::{Code, Problem, Secret};

/// The variable that has a token.
const TOKEN: &str = "TAPLINE_TOKEN";

/// Options that say where.
#[derive(Clone, Debug, clap::Args)]
pub struct Place {
    /// The daemon's socket; also TAPLINE_SOCKET [default: /run/tapline/taplined.sock]
    #[arg(long, global = true, value_name = "PATH", conflicts_with_all = ["connect", "ca", "token_file"])]
    socket: Option<PathBuf>,
    /// The address of a daemon, https://HOST:PORT, instead of its socket; also TAPLINE_CONNECT
    #[arg(long, global = true, value_name = "URL")]
    connect: Option<String>,
    /// With an address: the PEM file that vouches for the daemon's certificate; also TAPLINE_CA [default: what this host trusts]
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// With an address: the file that holds a token [default: it is in TAPLINE_TOKEN itself]
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl Place {
    /// A client of the daemon there, and whether it is asked over the network.
    pub fn client(self) -> Result<(Client, bool), Problem> {
        let Place { socket, connect, ca, token_file } = self;
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
                let what = "TAPLINE_SOCKET and TAPLINE_CONNECT name two daemons";
                Err(Problem::new(Code::Invalid, what).advise("unset one, or say which: --socket or --connect"))
            }
            (_, Some(url)) => {
                let ca = ca.or(env::var_os("TAPLINE_CA").filter(|ca| !ca.is_empty()).map(PathBuf::from));
                Ok((Client::remote(Remote::new(&url, ca.as_deref(), &secret(token_file)?)?), true))
            }
            (_, None) if ca.is_some() || token_file.is_some() => {
                let what = "--ca and --token-file are for a daemon that is named by its address";
                Err(Problem::new(Code::Invalid, what).advise("name it: --connect https://HOST:PORT"))
            }
            (socket, None) => Ok((Client::new(socket.unwrap_or_else(|| SOCKET.into())), false)),
        }
    }
}

/// The token.
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
                let what = "a daemon that is asked over the network wants a token, and there is none";
                let advice = format!(
                    "name its file (--token-file FILE) or set {TOKEN}; root makes one on the daemon's host: \
                                      tapline token create NAME"
                );
                return Err(Problem::new(Code::Unauthorized, what).advise(advice));
            }
        },
    };
    text.trim().parse().map_err(|why| Problem::new(Code::Invalid, format!("{from} holds no token: {why}")))
}

//! The command line.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

use oncekey::{Abandon, Lapse};

use crate::tiers::Place;

pub(crate) const USAGE: &str = "\
usage: payments                  make the calls of the promise, print them, exit 1 if one is broken
       payments serve [FLAGS]    keep serving until SIGTERM or Ctrl-C, then drain and exit 0

  --listen HOST:PORT          where to listen; port 0 takes a free one   (127.0.0.1:8080)
  --wait-ms N                 how long a duplicate waits, 0 = never      (10000)
  --retention-ms N            how long an answer is kept                 (86400000, a day)
  --lease-ms N                how long a silent owner keeps its claim    (60000)
  --max-keys N                how many keys the store holds              (1000000)
  --max-bytes N               how many bytes the store holds             (536870912, 512 MiB)
  --on-abandon hold|release   what becomes of the key of a charge that
                              panicked or was cut off                    (hold)
  --on-lapse hold|takeover    what becomes of the key of a charge whose
                              process died; needs a tier                 (hold)
  --drain-ms N                how long a stop waits for running charges  (25000)
  --tier PLACE                where keys are kept                        (memory)
                              memory           until the process ends
                              embedded:DIR     in a directory of its own
                              sqlite:PATH      in a database file, with the charges
                              postgres://...   on a server, with the charges
                              redis://...      on a server";

const FLAGS: [&str; 10] = [
    "--listen",
    "--wait-ms",
    "--retention-ms",
    "--lease-ms",
    "--max-keys",
    "--max-bytes",
    "--on-abandon",
    "--on-lapse",
    "--drain-ms",
    "--tier",
];

/// What the command line sets; what it leaves open is the default of the library.
pub(crate) struct Settings {
    pub(crate) listen: Vec<SocketAddr>,
    pub(crate) wait: Option<Duration>,
    pub(crate) retention: Option<Duration>,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_keys: Option<usize>,
    pub(crate) max_bytes: Option<usize>,
    pub(crate) on_abandon: Option<Abandon>,
    pub(crate) on_lapse: Lapse,
    pub(crate) tier: Place,
    pub(crate) drain: Duration,
}

pub(crate) enum Command {
    Promise,
    Serve(Settings),
    Help,
}

impl Settings {
    pub(crate) fn new(listen: SocketAddr) -> Self {
        Self {
            listen: vec![listen],
            wait: None,
            retention: None,
            lease: None,
            max_keys: None,
            max_bytes: None,
            on_abandon: None,
            on_lapse: Lapse::Hold,
            tier: Place::Memory,
            // Less than the 30 s after which an orchestrator usually kills.
            drain: Duration::from_secs(25),
        }
    }

    fn set(&mut self, flag: &str, value: &str) -> Result<(), String> {
        let bad = |wanted: &str| format!("{flag} wants {wanted}, not {value:?}");
        let ms = || match value.parse() {
            Ok(ms) => Ok(Duration::from_millis(ms)),
            Err(_) => Err(bad("a number of milliseconds")),
        };
        let count = || value.parse().map(Some).map_err(|_| bad("a number"));
        match flag {
            "--listen" => {
                let found = value.to_socket_addrs().map_err(|_| bad("an address as HOST:PORT"))?;
                self.listen = found.collect();
            }
            "--wait-ms" => self.wait = Some(ms()?),
            "--retention-ms" => self.retention = Some(ms()?),
            "--lease-ms" => self.lease = Some(ms()?),
            "--drain-ms" => self.drain = ms()?,
            "--max-keys" => self.max_keys = count()?,
            "--max-bytes" => self.max_bytes = count()?,
            "--on-abandon" => {
                self.on_abandon = Some(match value {
                    "hold" => Abandon::Hold,
                    "release" => Abandon::Release,
                    _ => return Err(bad("hold or release")),
                });
            }
            "--on-lapse" => {
                self.on_lapse = match value {
                    "hold" => Lapse::Hold,
                    "takeover" => Lapse::TakeOver,
                    _ => return Err(bad("hold or takeover")),
                };
            }
            "--tier" => {
                self.tier = value.parse().map_err(|()| {
                    bad("memory, embedded:DIR, sqlite:PATH, postgres://.. or redis://..")
                })?;
            }
            _ => return Err(format!("unknown flag {flag}")),
        }
        Ok(())
    }
}

impl Command {
    pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let arguments: Vec<String> = arguments.collect();
        if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
            return Ok(Self::Help);
        }
        let mut rest = arguments.iter();
        match rest.next().map(String::as_str) {
            None => return Ok(Self::Promise),
            Some("serve") => {}
            Some(other) => {
                return Err(format!("unknown argument {other:?}; the flags follow serve"));
            }
        }
        let mut settings = Settings::new(SocketAddr::from(([127, 0, 0, 1], 8080)));
        while let Some(argument) = rest.next() {
            match argument.split_once('=') {
                _ if !argument.starts_with("--") => {
                    return Err(format!("unknown argument {argument:?}"));
                }
                Some((flag, value)) => settings.set(flag, value)?,
                None if !FLAGS.contains(&argument.as_str()) => {
                    return Err(format!("unknown flag {argument}"));
                }
                None => {
                    let value = rest.next().ok_or_else(|| format!("{argument} wants a value"));
                    settings.set(argument, value?)?;
                }
            }
        }
        Ok(Self::Serve(settings))
    }
}

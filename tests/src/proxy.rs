//! A way to a node's HTTP out of its network namespace: the test itself stays outside.

use crate::network::{Space, enter};
use anyhow::Context;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// Listens on this machine's loopback device and passes connections on to an address inside a namespace.
#[derive(Debug)]
pub(crate) struct Proxy {
    address: SocketAddr,
    target: Arc<Mutex<Option<SocketAddr>>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a thread that lives inside the namespace.
    pub(crate) fn start(space: &Space) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listen for the proxy")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (namespace, target) = (space.open()?, Arc::new(Mutex::new(None)));
        let (stop, stopped) = oneshot::channel();
        let (ready, entered) = std::sync::mpsc::channel();
        let of_thread = Arc::clone(&target);
        let thread = std::thread::spawn(move || {
            // Sockets belong to the namespace of the thread that makes them; the listener was made outside.
            let made = enter(namespace.as_raw_fd())
                .and_then(|()| tokio::runtime::Builder::new_current_thread().enable_all().build());
            match made {
                Ok(runtime) => {
                    let _ = ready.send(Ok(()));
                    runtime.block_on(async {
                        tokio::select! {
                            _ = stopped => {}
                            () = serve(listener, &of_thread) => {}
                        }
                    });
                }
                Err(e) => drop(ready.send(Err(e))),
            }
        });
        entered.recv()?.context("enter the namespace")?;
        Ok(Self { address, target, stop: Some(stop), thread: Some(thread) })
    }

    /// Where to connect to.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where connections lead from now on.
    pub(crate) fn lead_to(&self, target: SocketAddr) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = Some(target);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A thread inside would keep the namespace alive.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

async fn serve(listener: TcpListener, target: &Mutex<Option<SocketAddr>>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    while let Ok((mut outside, _)) = listener.accept().await {
        let Some(target) = *target.lock().unwrap_or_else(PoisonError::into_inner) else { continue };
        tokio::spawn(async move {
            // What fails here is seen by the caller, whose connection closes.
            if let Ok(mut inside) = tokio::net::TcpStream::connect(target).await {
                let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
            }
        });
    }
}

// The search of the site runs in a worker, which a browser refuses to a page opened from a file. There it runs in a hidden
// frame instead. The theme names such a replacement IFrameWorker (mkdocs-material's plugin `offline` takes one from another
// host), and its search asks for that name to know how it was started.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    #loaded;

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      // What the script in the frame sends goes to whoever listens to this object.
      frame.receive = data => this.dispatchEvent(new MessageEvent("message", {data}));
      frame.srcdoc = `<script>window.postMessage = data => frameElement.receive(data)</script><script src="${url}"></script>`;
      this.#loaded = new Promise(resolve => frame.addEventListener("load", () => resolve(frame.contentWindow)));
      document.addEventListener("DOMContentLoaded", () => document.body.append(frame));
      if (document.readyState !== "loading") document.body.append(frame);
    }

    postMessage(data) {
      this.#loaded.then(target => target.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
